"""Which specialisations are compiled: kernel × phase × target × precision × head_dim × variant. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pabench.errors import UsageError, did_you_mean
from pabench.pairwise import covering_rows
from pabench_kernels.target import UnknownTargetError, find_target

DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
DEFAULT_HEAD_DIMS = (64, 80, 128, 256)  # 80: padded tiles, strides that no power of two divides
MAX_HEAD_DIM = 1024
PRECISIONS = {  # what --dtype takes → (dtype of the query, dtype of the cache)
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp8_e4m3": ("bf16", "fp8_e4m3"),
    "fp8_e5m2": ("bf16", "fp8_e5m2"),
    "int8": ("bf16", "int8"),
}
_ALIASES = {"fp8": "fp8_e4m3"}
VARIANTS = ("plain", "features")  # bare attention with 4 query heads a KV head, or every feature the kernel supports


@dataclass(frozen=True)
class CompileCase:
    """One specialisation: what the kernel's launcher launches on such a batch."""

    kernel: str
    phase: str
    target: str
    dtype: str
    kv_dtype: str
    head_dim: int
    variant: str

    @property
    def case_id(self) -> str:
        precision = f"{self.dtype}:kv-{self.kv_dtype}"
        return f"compile:{self.target}:{precision}:d{self.head_dim}:{self.phase}:{self.variant}:{self.kernel}"

    @property
    def repro(self) -> str:
        precision = self.kv_dtype if self.kv_dtype != self.dtype else self.dtype
        words = ["pabench", "compile", "-k", self.kernel, "--target", self.target, "--dtype", precision]
        return shlex.join([*words, "--head-dim", str(self.head_dim), "--full"])


def chosen_targets(names: Sequence[str] | None) -> tuple[str, ...]:
    """Raises ``UsageError`` for a target nobody knows."""
    try:
        return tuple(find_target(name).name for name in dict.fromkeys(names or DEFAULT_TARGETS))
    except UnknownTargetError as error:
        raise UsageError(str(error)) from error


def chosen_precisions(names: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """(dtype, KV dtype) pairs. Raises ``UsageError`` for a name nobody knows."""
    wanted = [_ALIASES.get(name, name) for name in names or PRECISIONS]
    for name in wanted:
        if name not in PRECISIONS:
            raise UsageError(f"unknown dtype '{name}'; {did_you_mean(name, [*PRECISIONS, *_ALIASES])}")
    return tuple(dict.fromkeys(PRECISIONS[name] for name in wanted))


def chosen_head_dims(texts: Sequence[str] | None) -> tuple[int, ...]:
    """Raises ``UsageError`` for what is no head_dim."""
    for text in texts or ():
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_HEAD_DIM):
            raise UsageError(f"--head-dim must be a whole number from 1 to {MAX_HEAD_DIM}, got '{text}'")
    return tuple(dict.fromkeys(int(text) for text in texts or ())) or DEFAULT_HEAD_DIMS


def plan_cases(
    phases_of: Mapping[str, Sequence[str]],
    targets: Sequence[str],
    precisions: Sequence[tuple[str, str]],
    head_dims: Sequence[int],
    *,
    full: bool = False,
) -> list[CompileCase]:
    """Cases of every kernel: the full product, or so few that any two values of two factors meet (with one target and
    one phase that is every precision × head_dim)."""
    cases = []
    for kernel, phases in phases_of.items():
        factors: list[list[Any]] = [list(phases), list(targets), list(precisions), list(head_dims), list(VARIANTS)]
        rows: Iterable[tuple[Any, ...]] = product(*factors) if full else covering_rows(factors)
        for phase, target, (dtype, kv_dtype), head_dim, variant in rows:
            cases.append(CompileCase(kernel, phase, target, dtype, kv_dtype, head_dim, variant))
    return cases
