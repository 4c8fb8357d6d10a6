"""What the cgroups of this process allow, v1 and v2. ``root`` is "/" except in tests, which bring a tree of their own.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT_V1 = 1 << 62  # v1 writes "no limit" as the largest multiple of the page size
_V1_MOUNTS = ("sys/fs/cgroup/memory", "sys/fs/cgroup")
_V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")


@dataclass(frozen=True)
class CgroupLimit:
    """One level that limits memory: bytes allowed, and bytes used that cannot be reclaimed."""

    limit_bytes: int
    used_bytes: int


def cgroup_limits(root: Path) -> list[CgroupLimit]:
    """Every limit from this process's own cgroup up to the mount's root; the tightest counts.

    Page cache on the kernel's file lists is given back under pressure, so it does not count as used (tmpfs does: it is
    on the anonymous lists). Raises ``OSError`` or ``ValueError`` for files that are there and cannot be understood.
    """
    own = root / "proc/self/cgroup"
    if not own.exists():
        return []
    lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    v1 = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    v2 = [path for number, controllers, path in lines if number == "0" and not controllers]
    found = [limit for path in v1 for limit in _levels(root, _V1_MOUNTS, path, _v1)]
    return found + [limit for path in v2 for limit in _levels(root, _V2_MOUNTS, path, _v2)]


def _levels(root: Path, mounts: tuple[str, ...], path: str, read: _Reader) -> Iterator[CgroupLimit]:
    """In a container the path may be the host's, of which only the mount's root is visible: what is not there is
    passed over, the levels above it are not."""
    relative = PurePosixPath(path.lstrip("/"))
    parts = [] if ".." in relative.parts else [relative, *relative.parents]
    for mount in mounts:
        for part in dict.fromkeys([*parts, PurePosixPath(".")]):
            if (limit := read(root / mount / part)) is not None:
                yield limit


class _Reader:
    def __init__(self, limit: str, usage: str, reclaimable: tuple[str, ...]) -> None:
        self.limit, self.usage, self.reclaimable = limit, usage, reclaimable

    def __call__(self, folder: Path) -> CgroupLimit | None:
        file = folder / self.limit
        if not file.is_file() or (text := file.read_text().strip()) == "max":
            return None
        if (limit := int(text)) >= _NO_LIMIT_V1:
            return None
        usage = int((folder / self.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return CgroupLimit(limit, max(0, usage - sum(int(stat.get(name, 0)) for name in self.reclaimable)))


_v1 = _Reader("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_v2 = _Reader("memory.max", "memory.current", ("active_file", "inactive_file"))
