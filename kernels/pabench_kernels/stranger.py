"""A plain function in anybody's file as a kernel: taken to support everything unless it says otherwise."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pabench_kernels.contract import ALL_PHASES, Kernel
from pabench_kernels.trace import count_launch


def load_file(path: str, function: str) -> Kernel:
    """The kernel ``function`` of the Python file ``path``. Raises ``LookupError`` with a sentence for the user."""
    file = Path(path).expanduser()
    try:
        found_file = file.is_file()
    except (OSError, ValueError):  # a name that no file system would take
        found_file = False
    if not found_file:
        raise LookupError(f"kernel file '{path}' does not exist; give FILE.py:FUNCTION")
    if function and not function.isidentifier():
        raise LookupError(
            f"kernel '{path}:{function}': '{function}' is no name of a Python function; give FILE.py:FUNCTION"
        )
    module = _import_file(file, path)
    found = getattr(module, function, None) if function else None
    if found is None or not callable(found):
        names = sorted(
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__ and not n.startswith("_")
        )
        what = f"no function '{function}'" if function else "no function named"
        raise LookupError(f"kernel '{path}': {what}; its functions are: {', '.join(names) or 'none'}")
    name = f"{file.name}:{function}"
    _count_triton_launches(module, name)
    if isinstance(found, Kernel):  # a registered kernel that the file re-exports is itself; any other is the file's own
        return found if found.fn.__module__ != module.__name__ else replace(found, name=name, stranger=True)
    return as_kernel(found, name)


def as_kernel(fn: Callable[..., Any], name: str) -> Kernel:
    """Wrap a plain function ``fn(batch) -> Tensor`` with its optional attributes.

    They are ``unsupported``, ``phases``, ``plan`` and ``per_token_scales`` (true if it takes scales [NB, BS, Hkv]).

    Raises ``LookupError`` if ``phases`` names anything but prefill and decode, or if ``plan`` is no function whose
    result ``fn`` takes as the keyword ``state``.
    """
    given = getattr(fn, "phases", ALL_PHASES)
    try:
        phases = frozenset({given} if isinstance(given, str) else given)
    except TypeError:
        phases = frozenset()
    if not phases or not phases <= ALL_PHASES:
        raise LookupError(f"kernel '{name}': phases must be some of prefill, decode, got {given!r}")
    limits = getattr(fn, "unsupported", None)
    if limits is not None and not callable(limits):
        raise LookupError(f"kernel '{name}': unsupported must be a function of the batch, got {limits!r}")
    try:
        parameters = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a builtin may have no signature
        parameters = set()
    plan = getattr(fn, "plan", None)
    if plan is not None and not (callable(plan) and "state" in parameters):
        raise LookupError(f"kernel '{name}': plan must be a function of the batch, and the kernel must take state=")
    return Kernel(
        name=name,
        fn=fn,
        phases=phases,
        declared_limits=limits,
        per_token_scales=bool(getattr(fn, "per_token_scales", False)),
        stranger=True,
        has_lse="return_lse" in parameters,
        has_out="out" in parameters,
        plan_fn=plan,
    )


def _import_file(file: Path, shown: str) -> ModuleType:
    resolved = file.resolve()
    unique = f"pabench_stranger_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(unique, resolved)
    if spec is None or spec.loader is None:
        raise LookupError(f"kernel file '{shown}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and Triton look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(unique, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise LookupError(f"kernel file '{shown}' cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _count_triton_launches(module: ModuleType, name: str) -> None:
    """Count launches of the Triton functions defined in this very file.

    Both JIT and interpreted functions are launched through ``run``, so that is where the count belongs.
    """
    for value in vars(module).values():
        run, inner = getattr(value, "run", None), getattr(value, "fn", None)
        if not type(value).__module__.startswith("triton.") or not callable(run):
            continue
        while inner is not None and not inspect.isfunction(inner):  # autotune and heuristics wrap a JIT function
            inner = getattr(inner, "fn", None)
        if inner is None or inner.__module__ != module.__name__:
            continue

        def counted(*args: Any, _run: Callable[..., Any] = run, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                count_launch(name)
            return _run(*args, **kwargs)

        value.run = counted
