"""What pabench can do on this machine, found by trying: each kernel is judged on a small batch, as a run would do it.

Nothing is downloaded, and nothing is written but the caches that kernels compile into.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pabench import __version__
from pabench.environment import core_count, cpu_model, device_name, installed, thread_count, triton_mode
from pabench.errors import PabenchError
from pabench.planner.providers import of_torch_device

State = Literal["ok", "note", "bad"]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "lm-eval")
_DTYPES = ("fp32", "bf16")
_LITTLE_MEMORY = 2 << 30
_HANG_TIMEOUT_S = 120.0  # a first compilation is slow
_LIMITS = {
    "interpreter": (
        "races between programs or threads: programs run one after the other",
        "limits of shared memory, registers and tile sizes of a GPU",
        "what the compiler makes of a kernel: fused or reordered arithmetic, tensor-core rounding",
        "speed: an interpreted kernel is thousands of times slower",
    ),
    "gpu": (
        "other GPUs: limits and rounding differ between architectures",
        "races that do not happen to strike in this run",
    ),
    "none": ("Triton kernels: they need triton, and a GPU or its interpreter",),
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``state`` note is worth knowing, bad is missing."""

    group: str
    name: str
    state: State
    text: str


@dataclass(frozen=True)
class KernelFinding:
    """A kernel judged on a small batch in each dtype: "PASS", or why there is no answer."""

    name: str
    available: bool
    results: dict[str, str]
    reason: str | None


@dataclass(frozen=True)
class Examination:
    """All findings. ``mode`` is how Triton kernels run on ``device``."""

    device: str
    mode: Literal["gpu", "interpreter", "none"]
    findings: tuple[Finding, ...]
    kernels: tuple[KernelFinding, ...]
    cannot_show: tuple[str, ...]

    @property
    def can_judge(self) -> bool:
        return any(k.available for k in self.kernels)

    @property
    def exit_code(self) -> int:
        return 0 if self.can_judge else 3


def default_device() -> str:
    """ "cuda" where torch sees one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def examine(device: str) -> Examination:
    """Look at everything on ``device``. Raises ``PabenchError`` for a device that does not exist."""
    from pabench.models.load import require_device

    require_device(device)
    mode = triton_mode(device)
    kernels = tuple(_kernels(device))
    findings = (*_mode(device, mode), *_versions(), *_machine(device), *_compiler(), *_caches(), *_models())
    limits = _LIMITS[mode]
    if mode == "interpreter":
        limits += tuple(_wrong_in_interpreter())
    return Examination(device, mode, findings, kernels, limits)


def _mode(device: str, mode: str) -> Iterator[Finding]:
    texts = {
        "gpu": f"Triton kernels are compiled and run on {device_name(device) or device}",
        "interpreter": "Triton kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1)",
        "none": "Triton kernels cannot run: triton is not installed"
        if installed("triton") is None
        else "Triton kernels cannot run: no GPU was asked for, and TRITON_INTERPRET says not to interpret",
    }
    yield Finding("mode", mode, "bad" if mode == "none" else "ok", texts[mode])


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "pabench", "ok", __version__)
    yield Finding("versions", "python", "ok", platform.python_version())
    for package in _PACKAGES:
        found = installed(package)
        yield Finding("versions", package, "ok" if found else "note", found or "not installed")


def _machine(device: str) -> Iterator[Finding]:
    yield Finding("machine", "processor", "ok", cpu_model() or "unknown")
    cores, threads = core_count(), thread_count()
    spinning = (threads or 1) > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    hint = "; OMP_WAIT_POLICY=passive keeps them from spinning beside other work" if spinning else ""
    yield Finding("machine", "cores", "note" if spinning else "ok", f"{cores}, torch uses {threads} threads{hint}")
    for name in dict.fromkeys(("cpu", device)):
        yield _memory(name)


def _memory(device: str) -> Finding:
    """A container's limits are counted in."""
    import torch

    name, here = "memory" if device == "cpu" else f"{device} memory", of_torch_device(torch.device(device))
    if here.total_bytes is None or here.used_bytes is None:
        return Finding("machine", name, "note", f"unknown: {here.why}")
    free = here.total_bytes - here.used_bytes
    scarce = free < _LITTLE_MEMORY
    text = f"{free / 2**30:.1f} GiB available of {here.total_bytes / 2**30:.1f} GiB"
    return Finding("machine", name, "note" if scarce else "ok", text + (": little for a real model" if scarce else ""))


def _compiler() -> Iterator[Finding]:
    from pabench_kernels.native_build import BuildError, find_compiler

    try:
        yield Finding("machine", "C++ compiler", "ok", " ".join(find_compiler()))
    except BuildError as error:
        yield Finding("machine", "C++ compiler", "note", f"{error}; only cpu_native needs one")


def _caches() -> Iterator[Finding]:
    from pabench.models.cache import ENV, cache_root
    from pabench_kernels.native_build import cache_dir

    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    folders = {
        "models": (cache_root(), f"set {ENV}"),
        "cpu_native": (cache_dir(), f"set {ENV}"),
        "triton": (Path(triton), "set TRITON_CACHE_DIR"),
        "results": (Path("results"), "choose another folder with -o"),
    }
    for name, (folder, remedy) in folders.items():
        why = _not_writable(folder)
        shown = str(folder).replace(str(Path.home()), "~", 1)
        yield Finding("folders", name, "bad" if why else "ok", f"{shown} ({why}; {remedy})" if why else shown)


def _not_writable(folder: Path) -> str | None:
    """Why a file cannot be made in the folder, or in the nearest one above it that exists."""
    here = folder.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    try:
        with tempfile.TemporaryFile(dir=here):
            return None
    except OSError as error:
        return f"not writable: {error.strerror}"


def _models() -> Iterator[Finding]:
    from pabench.models.catalog import BUILT_INS, RANDOM_GEOMETRIES
    from pabench.models.fetch import on_disk

    names = ", ".join(m.name for m in RANDOM_GEOMETRIES)
    yield Finding("models", "random", "ok", f"{names}: made on the spot, no network needed")
    for model in BUILT_INS:
        here = on_disk(model) is not None
        megabytes = sum(wheel.download_bytes for wheel in model.wheels) / 1e6
        text = "here, no network needed" if here else f"not here; its first run downloads {megabytes:.0f} MB"
        yield Finding("models", model.name, "ok" if here else "note", text)


def _kernels(device: str) -> Iterator[KernelFinding]:
    from pabench_kernels.availability import why_not
    from pabench_kernels.registry import UnknownKernelError, kernel_specs

    try:
        specs = kernel_specs()
    except UnknownKernelError as error:  # two of one name: none can be asked for
        yield KernelFinding("all", False, {}, str(error))
        return
    for name, spec in sorted(specs.items()):
        if reasons := why_not(spec):
            yield KernelFinding(name, False, {}, "; ".join(reasons))
            continue
        if spec.compiled_per_shape:
            yield KernelFinding(name, False, {}, "not tried: it compiles for seconds for every shape")
            continue
        try:
            results = _tried(name, device)
        except PabenchError as error:
            yield KernelFinding(name, False, {}, str(error))
            continue
        reasons = [text for text in results.values() if text != "PASS"]
        yield KernelFinding(name, "PASS" in results.values(), results, reasons[0] if reasons else None)


def _tried(kernel: str, device: str) -> dict[str, str]:
    """For each dtype "PASS", or why the kernel gave no right answer on a small batch of either phase."""
    from pabench.runner.judge import Judging
    from pabench.runner.options import RunOptions, Unwatched
    from pabench.runner.plan import make_plan
    from pabench.suite import load_suite

    check = {"batch_specs": ["plain-decode", "plain-prefill"], "probes": ["iid"]}
    suite = load_suite("kernels", {"kernels": [kernel], "dtypes": list(_DTYPES), "kernel_check": check})
    options = RunOptions((), Path(), device=device, hang_timeout_s=_HANG_TIMEOUT_S)
    plan = make_plan(suite, options)
    found: dict[str, str] = {}
    for record in Judging(suite, options, plan, Unwatched()).records(()):
        dtype = record.dtype or ""
        if record.status in ("FAIL", "ERROR"):
            found[dtype] = f"{record.status} here: {record.message}"
        elif record.status == "PASS" and not found.get(dtype, "").startswith(("FAIL", "ERROR")):
            found[dtype] = "PASS"
        else:
            found.setdefault(dtype, record.message.removeprefix("unsupported: "))
    return found


def _wrong_in_interpreter() -> Iterator[str]:
    from pabench_kernels.interpreter import wrong_here

    if wrong := sorted(wrong_here()):
        yield f"other people's Triton kernels that need {', '.join(wrong)}: this interpreter gets that wrong"
