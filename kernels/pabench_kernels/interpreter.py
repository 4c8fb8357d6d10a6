"""What Triton's interpreter cannot compute, found by trying it, and whether a kernel asked for it.

The interpreter keeps bf16 and fp8 numbers as integers. Where this version adds or multiplies those as integers, a right
kernel gives garbage, and nothing is known about the kernel. So each kind of operation is tried once a process; those
that come out wrong are watched, and a call that used one is refused. Conversions to and from bf16 and fp8 are held
against torch's, element by element: most are right, and a kernel may well load bf16 and compute in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pabench_kernels.triton_common import interpreting

_SIZE = 16
_TORCH = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Operations that only move elements, or that no narrow float ever reaches; every other one computes.
_MOVES = frozenset(
    f"create_{name}"
    for name in """
        addptr atomic_cas atomic_load atomic_poll atomic_store bitcast broadcast cat descriptor_gather descriptor_load
        descriptor_scatter descriptor_store expand_dims fabs gather int_to_ptr join load make_range
        make_tensor_descriptor masked_load masked_store print ptr_to_int reshape select splat split store trans unsplat
    """.split()  # noqa: SIM905
)
_CASTS = frozenset({"create_fp_ext", "create_fp_trunc", "create_fp_to_fp"})

_used: set[str] | None = None  # what the call being watched asked for and the interpreter computes wrongly


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect what calls inside the block ask of the interpreter that it computes wrongly, as "bf16 dot"."""
    global _used
    if not interpreting():
        yield set()
        return
    _install()
    before, _used = _used, set()
    try:
        yield _used
    finally:
        _used = before


@cache
def wrong_here() -> frozenset[str]:
    """What this version's interpreter computes wrongly: of "bf16 arithmetic", "bf16 dot", the same for fp8e4nv, fp8e5.

    An operation that it refuses is left out: a kernel that uses it raises by itself.
    """
    found = set()
    for dtype in ("bf16", "fp8e4nv", "fp8e5"):
        for what, attempt in (("arithmetic", _adds_rightly), ("dot", _multiplies_rightly)):
            try:
                right = attempt(_TORCH[dtype])
            except Exception:  # whatever it refuses with
                right = True
            if not right:
                found.add(f"{dtype} {what}")
    return frozenset(found)


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def _dot(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def _adds_rightly(dtype: torch.dtype) -> bool:
    x, y = (torch.arange(_SIZE) * step for step in (0.25, -0.75))  # all sums are exact in every dtype
    out = torch.zeros(_SIZE, dtype=dtype)
    _add[(1,)](x.to(dtype), y.to(dtype), out, N=_SIZE)
    return torch.equal(out.float(), (x.to(dtype).float() + y.to(dtype).float()).to(dtype).float())


def _multiplies_rightly(dtype: torch.dtype) -> bool:
    x = ((torch.arange(_SIZE * _SIZE) % 5) - 2.0).view(_SIZE, _SIZE)
    out = torch.zeros(_SIZE, _SIZE)
    _dot[(1,)](x.to(dtype), x.T.contiguous().to(dtype), out, N=_SIZE)
    return torch.equal(out, x @ x.T)


@cache
def _install() -> None:
    """Look at the operands of the interpreter's operations, for the rest of the process. Must not change a result."""
    from triton.runtime import interpreter

    wrong = wrong_here()
    builder = interpreter.interpreter_builder
    for name in dir(builder):
        if name in _CASTS:
            setattr(builder, name, _compared(getattr(builder, name)))
        elif name.startswith("create_") and name not in _MOVES:
            kind = "dot" if name.startswith("create_dot") else "arithmetic"
            watched_kinds = {w.partition(" ")[0]: w for w in wrong if w.endswith(kind)}
            setattr(builder, name, _looked_at(getattr(builder, name), watched_kinds))
    reductions = interpreter.ReduceScanOpInterface
    kinds = {w.partition(" ")[0]: w for w in wrong if w.endswith("arithmetic")}
    reductions.apply = _looked_at(reductions.apply, kinds)  # past the builder


def _looked_at(operation: Callable[..., Any], wrong: dict[str, str]) -> Callable[..., Any]:
    def looking(*args: Any, **kwargs: Any) -> Any:
        if _used is not None:
            for dtype in map(_dtype, _flat(args)):
                if dtype in wrong:
                    _used.add(wrong[dtype])
        return operation(*args, **kwargs)

    return looking


def _compared(cast: Callable[..., Any]) -> Callable[..., Any]:
    def comparing(source: Any, *args: Any, **kwargs: Any) -> Any:
        result = cast(source, *args, **kwargs)
        if _used is not None:
            before, after = _dtype(source), _dtype(result)
            narrow = [d for d in (before, after) if d in ("bf16", "fp8e4nv", "fp8e5")]
            if narrow and before in _TORCH and after in _TORCH and not _converted(source, result, before, after):
                _used.add(f"{narrow[0]} conversion")
        return result

    return comparing


def _converted(source: Any, result: Any, before: str, after: str) -> bool:
    """Whether the conversion gave what torch gives; beyond the target's range either may saturate or give NaN."""
    wanted = _numbers(source.data, _TORCH[before])
    got = _numbers(result.data, _TORCH[after]).double()
    inside = ~(wanted.double().abs() > torch.finfo(_TORCH[after]).max)
    wanted = wanted.to(_TORCH[after]).double()
    return bool(((wanted == got) | (wanted.isnan() & got.isnan()) | ~inside).all())


def _numbers(data: Any, dtype: torch.dtype) -> Tensor:
    """The numbers that the interpreter keeps as integers of their width."""
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.ascontiguousarray(data).view(signed).copy()).view(dtype)


def _dtype(operand: Any) -> str | None:
    """The element dtype of a handle or a tensor of the language, by Triton's name; None for pointers and others."""
    handle = getattr(operand, "handle", operand)
    scalar = getattr(getattr(handle, "dtype", None), "scalar", None)
    name = getattr(scalar, "name", None)
    return name if isinstance(name, str) else None


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _flat(tuple(arg))
        else:
            yield arg
