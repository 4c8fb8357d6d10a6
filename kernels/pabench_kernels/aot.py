"""Compile what a kernel would launch, for a GPU that need not be there.

The kernel's own launcher runs on stand-in tensors; each ``function[grid](…)`` it comes to is specialised and compiled
by Triton's own launch path, which stops before the launch. So there is no second description of a kernel that could
drift from what it launches, and a kernel has nothing to add to be compiled. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, KernelInterface

from pabench_kernels.contract import Kernel, PagedBatch
from pabench_kernels.resources import Resources, read_resources
from pabench_kernels.standin import pretending
from pabench_kernels.target import TARGETS, Target

# What Triton and LLVM raise for a program they do not take; anything else that a compile raises is a crash.
_REFUSALS = (TritonError, RuntimeError, ValueError, NotImplementedError, AssertionError)


class CompilerRefusedError(Exception):
    """The compiler does not take the kernel for this target. The text is its reason, in one line."""


class CompilerCrashedError(Exception):
    """The compiler failed in a way that is no answer about the kernel."""


class LauncherFailedError(Exception):
    """The kernel's launcher raised before it launched anything."""


@dataclass(frozen=True)
class Binary:
    """One compiled Triton function of a launch."""

    function: str
    num_warps: int
    num_stages: int
    resources: Resources


class _NoDriver:
    """Stands where Triton's GPU driver stands, as far as a compile asks it: one device per target."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target.name)  # Triton keeps compiled functions by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self._target.backend, self._target.arch, self._target.warp_size)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Callable[..., Any]:
        raise RuntimeError("nothing can be timed on a GPU that is not there")


def aim_at(target: Target) -> None:
    """Make Triton compile for ``target`` in this process. To be called before kernels are loaded, too."""
    _take_over_launches()
    driver.set_active(_NoDriver(target))


def compile_launches(kernel: Kernel, batch: PagedBatch, target: Target, *, return_lse: bool = False) -> list[Binary]:
    """Compile every Triton function that ``kernel(batch)`` launches; ``batch`` holds stand-in tensors.

    Raises ``CompilerRefusedError`` (too much shared memory for a block of the target is one), ``CompilerCrashedError``
    or ``LauncherFailedError``. An empty list: the kernel launched no Triton function.
    """
    compiled: list[tuple[str, Any]] = []
    with on_target(target), _compiling_only(compiled):
        try:
            kernel(batch, return_lse=return_lse)
        except (CompilerRefusedError, CompilerCrashedError):
            raise
        except Exception as error:
            raise LauncherFailedError(f"{type(error).__name__}: {one_line(str(error))}") from error
    binaries = [
        Binary(name, int(c.metadata.num_warps), int(c.metadata.num_stages), read_resources(c, target))
        for name, c in compiled
    ]
    for binary in binaries:
        if (needed := binary.resources.shared_bytes) > target.shared_bytes:
            raise CompilerRefusedError(
                f"{binary.function} needs {needed:,} bytes of shared memory; a block on {target.name} has "
                f"{target.shared_bytes:,} at most"
            )
    return binaries


@contextmanager
def on_target(target: Target) -> Iterator[None]:
    """Inside, Triton and ``torch.cuda`` answer for the target, and tensors can be made on it."""
    aim_at(target)
    with pretending(target):
        yield


def launches_triton(kernel: Kernel, batch: PagedBatch, target: Target) -> bool:
    """Whether the kernel's file has a Triton function, or its launcher comes to launch one of another file's."""
    namespace = getattr(kernel.fn, "__globals__", {})
    if any(isinstance(v, JITFunction | KernelInterface) for v in namespace.values()):
        return True
    with on_target(target), _compiling_only(_FirstLaunch()):
        try:
            kernel(batch)
        except _Launched:
            return True
        except Exception:  # it needs what is not there; whatever that is, it was no launch
            return False
    return False


class _Launched(Exception):
    """A launch was reached."""


class _FirstLaunch(list[tuple[str, Any]]):
    """Stands for "do not compile, only say that there is a launch"."""


# What `compile_launches` has compiled so far; None while it is not at work.
_compiled: list[tuple[str, Any]] | None = None


@contextmanager
def _compiling_only(compiled: list[tuple[str, Any]]) -> Iterator[None]:
    """Launches inside are compiled and noted, not made."""
    global _compiled
    _compiled = compiled
    try:
        yield
    finally:
        _compiled = None


@cache
def _take_over_launches() -> None:
    """Put ourselves between a launch and Triton, once. Before kernels are loaded: who counts a file's launches keeps
    hold of the ``run`` it finds."""
    launch, tune = JITFunction.run, Autotuner.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if _compiled is None:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        if isinstance(_compiled, _FirstLaunch):
            raise _Launched
        try:
            found = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except _REFUSALS as error:
            reason = reason_of(error)
            if "SIGSEGV" in reason:
                raise CompilerCrashedError(f"{self.fn.__name__}: {reason}") from error
            raise CompilerRefusedError(f"{self.fn.__name__}: {reason}") from error
        except Exception as error:
            raise CompilerCrashedError(f"{self.fn.__name__}: {type(error).__name__}: {one_line(str(error))}") from error
        _compiled.append((self.fn.__name__, found))
        return found

    def first_that_compiles(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiled is None:
            return tune(self, *args, **kwargs)
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        refused: Exception = CompilerRefusedError("no configuration is left after pruning")
        for config in self.prune_configs(kwargs):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except CompilerRefusedError as error:  # tuning passes such a configuration over
                refused = error
        raise refused

    JITFunction.run, Autotuner.run = run, first_that_compiles


def reason_of(error: BaseException) -> str:
    """The compiler's own words: the innermost cause, without the excerpt of the source."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return one_line(str(getattr(error, "error_message", None) or error)) or type(error).__name__


def one_line(text: str) -> str:
    """The last line that says something: messages of compilers end with the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
