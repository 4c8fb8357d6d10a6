"""Memory that this process may use, where a container allows less than the machine has. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a huge number for "no limit"


@dataclass(frozen=True)
class Memory:
    """Bytes in all and free for the taking, and who sets the limit: "machine" or "container"."""

    total_bytes: int
    available_bytes: int
    limited_by: str


def memory(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> Memory | None:
    """The tightest of the machine's memory and its control groups' limits; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    limited_by = "machine"
    for limit, used in _limits(proc, cgroups):
        if limit < total:
            total, limited_by = limit, "container"
        available = min(available, max(limit - used, 0))
    return Memory(total, available, limited_by)


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of every control group this process is in, outermost last."""
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == base.parent:
                break
            if (found := _limit(group, *names)) is not None:
                yield found


def _limit(group: Path, limit: str, usage: str, droppable: str) -> tuple[int, int] | None:
    try:
        allowed, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or no such group
        return None
    return None if allowed >= _UNLIMITED else (allowed, used - int(stat.get(droppable, 0)))
