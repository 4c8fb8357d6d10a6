"""What a result may depend on: versions, processor, device, threads, git state. Imports no torch, names no host."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pabench import __version__
from pabench.records import Environment, Git

_GIT_TIMEOUT_S = 10


def collect(device: str = "cpu") -> Environment:
    """The environment of this process. Call it after torch was set up: then threads and device name are torch's."""
    return Environment(
        pabench=__version__,
        python=platform.python_version(),
        torch=installed("torch"),
        triton=installed("triton"),
        transformers=installed("transformers"),
        platform=" ".join(filter(None, [platform.system(), platform.machine(), *platform.libc_ver()])),
        cpu=cpu_model(),
        cores=core_count(),
        threads=thread_count(),
        device=device,
        device_name=device_name(device),
        triton_mode=triton_mode(device),
    )


def installed(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def triton_mode(device: str) -> Literal["interpreter", "gpu", "none"]:
    if installed("triton") is None:
        return "none"
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off"):
        return "interpreter"
    return "none" if device.startswith("cpu") else "gpu"


def use_interpreter_without_gpu(device: str) -> None:
    """Let Triton kernels run on the CPU, unless the user has decided. Call it before triton is imported."""
    if device.startswith("cpu"):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def core_count() -> int | None:
    """Cores this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def thread_count() -> int | None:
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.get_num_threads())
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdigit() else core_count()


def device_name(device: str) -> str | None:
    torch = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(device))


def git_state(folder: Path | None = None) -> Git:
    """Commit and dirtiness of the user's working directory; both None where there is no git or no repository."""
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return Git()
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Git(sha=sha, dirty=None if status is None else bool(status))


def _git(folder: Path | None, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *args],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
