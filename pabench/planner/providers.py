"""How much memory the devices here have and use, asked of the system. What cannot be measured is unknown, never 0."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pabench.planner.budget import Device
from pabench.planner.cgroup import cgroup_limits

Measure = Callable[[], tuple[int, int]]
SMALL_MAC = 36 << 30


def measured(name: str, kind: str, measure: Measure) -> Device:
    """A device with the (total, used) bytes that ``measure`` returns, or unknown with the reason if it fails."""
    try:
        total, used = measure()
        if total <= 0 or used < 0:
            raise ValueError(f"the system reports {total} bytes in all and {used} used")
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Device(name, kind, None, None, reason[0])
    return Device(name, kind, total, used)


def cpu(root: Path = Path("/")) -> Device:
    """This machine's memory as far as this process may use it: MemTotal and MemAvailable, within the cgroup limits."""
    return measured("cpu", "cpu", lambda: _linux(root) if (root / "proc/meminfo").exists() else _elsewhere())


def _linux(root: Path) -> tuple[int, int]:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    meminfo = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    limits = cgroup_limits(root)
    total = min([meminfo["MemTotal"], *(limit.limit_bytes for limit in limits)])
    free = min([meminfo["MemAvailable"], *(limit.limit_bytes - limit.used_bytes for limit in limits)])
    return total, total - min(max(0, free), total)


def _elsewhere() -> tuple[int, int]:
    if platform.system() != "Darwin":
        raise OSError(f"memory cannot be measured on {platform.system()}")
    return macos_memory(_sysctl("hw.memsize"), _run("vm_stat"))


def macos_memory(total: int, vm_stat: str) -> tuple[int, int]:
    """(total, used) of a Mac: what ``vm_stat`` counts as free, inactive, speculative or purgeable is not used."""
    page = int(vm_stat.split("page size of ")[1].split()[0])
    counts = {k: int(v.strip(" .")) for k, _, v in (line.partition(":") for line in vm_stat.splitlines()[1:]) if v}
    names = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
    free = sum(counts.get(name, 0) for name in names) * page
    return total, total - min(free, total)


def accelerators(torch: ModuleType) -> list[Device]:
    """Every CUDA or ROCm device that ``torch`` sees, or the Apple GPU."""
    kind = "rocm" if getattr(torch.version, "hip", None) else "cuda"
    found = []
    if torch.cuda.is_available():
        found = [gpu(torch, index, kind) for index in range(torch.cuda.device_count())]
    mps = getattr(torch.backends, "mps", None)
    return found or ([apple(torch)] if mps is not None and mps.is_available() else [])


def gpu(torch: ModuleType, index: int, kind: str) -> Device:
    """What the driver says is free and there, whoever uses it; ROCm answers through the same calls."""

    def measure() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(index)
        return total, total - free

    return measured(f"{kind}:{index}", kind, measure)


def apple(torch: ModuleType) -> Device:
    """Apple's unified memory: how much of it the GPU may wire, minus what its driver holds for this process."""

    def measure() -> tuple[int, int]:
        recommended = torch.mps.recommended_max_memory()
        limit = wired_limit(_sysctl("hw.memsize"), recommended, _wired_limit_mb())
        return limit, torch.mps.driver_allocated_memory()

    return measured("mps", "mps", measure)


def wired_limit(ram: int, recommended: int, limit_mb: int) -> int:
    """The set limit (iogpu.wired_limit_mb, 0 = none), else the recommended working set or 2/3 of RAM up to 36 GiB and
    3/4 above, whichever is larger. Bytes."""
    if limit_mb:
        return limit_mb << 20
    return max(recommended, ram * 2 // 3 if ram <= SMALL_MAC else ram * 3 // 4)


def here() -> list[Device]:
    """The accelerators of this machine, else its CPU. Without torch there is only the CPU."""
    if "torch" not in sys.modules:
        try:
            import torch  # noqa: F401
        except ImportError:
            return [cpu()]
    return accelerators(sys.modules["torch"]) or [cpu()]


def of_torch_device(device: Any) -> Device:
    """The memory behind a ``torch.device``."""
    import torch

    if device.type == "cpu":
        return cpu()
    if device.type == "mps":
        return apple(torch)
    index = torch.cuda.current_device() if device.index is None else device.index
    return gpu(torch, index, "rocm" if torch.version.hip else "cuda")


def _wired_limit_mb() -> int:
    try:
        return _sysctl("iogpu.wired_limit_mb")
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0  # older systems do not have the setting, so none is set


def _sysctl(name: str) -> int:
    return int(_run("sysctl", "-n", name))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
