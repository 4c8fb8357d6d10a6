"""The kernel contract: what every paged-attention kernel is given and what it must return.

Shape legend: T tokens of the packed batch, S sequences, Hq query heads, Hkv KV heads, D head_dim, Dv value head_dim,
NB blocks in the pool, BS tokens per block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pabench_kernels.trace import note_entry

if TYPE_CHECKING:
    from torch import Tensor

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
ALL_PHASES: frozenset[Phase] = frozenset(PHASES)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One attention call over a paged KV cache.

    Order of operations: q·k × scale → soft cap → + slope · (key_pos − query_pos) → mask → sink joins the denominator →
    softmax. The last query token of a sequence stands at position ``seq_len − 1``. A sequence of length 0 gives zeros
    and lse −inf, even with sinks. Nothing outside a sequence's own ``seq_lens`` tokens may influence its output.
    """

    query: Tensor  # [T, Hq, D], packed, no padding between sequences
    key_cache: Tensor  # [NB, BS, Hkv, D], any strides, last dim contiguous
    value_cache: Tensor  # [NB, BS, Hkv, Dv]
    block_table: Tensor  # int32 [S, max_blocks_per_seq]; -1 where unused
    seq_lens: Tensor  # int32 [S]; may be 0 (padding row)
    query_start_loc: Tensor  # int32 [S + 1]
    max_query_len: int  # host copies, so that no kernel must synchronise to learn them
    max_seq_len: int
    scale: float  # softmax scale; the kernel applies it, exactly this one
    k_scale: Tensor | None = None  # fp32 dequantisation factors: [] per tensor or [Hkv]; None = 1.0. One per token and
    v_scale: Tensor | None = None  #   head, [NB, BS, Hkv], only for kernels that declare `per_token_scales`
    causal: bool = True
    sliding_window: int | None = None  # lower bound only: key_pos > query_pos - window, causal or not
    alibi_slopes: Tensor | None = None  # fp32 [Hq]
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None  # fp32 [Hq]; joins the softmax denominator only

    @property
    def num_tokens(self) -> int:
        return int(self.query.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def num_q_heads(self) -> int:
        return int(self.query.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.key_cache.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.query.shape[2])

    @property
    def head_dim_v(self) -> int:
        return int(self.value_cache.shape[3])

    @property
    def block_size(self) -> int:
        return int(self.key_cache.shape[1])

    @property
    def group_size(self) -> int:
        """Query heads per KV head (71 for falcon-7b)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def phases(self) -> frozenset[Phase]:
        """The phases present: "decode" = one query token, "prefill" = more. Synchronises only for a ragged batch."""
        if self.max_query_len <= 1:
            return frozenset({"decode"})
        lens = self.query_start_loc.diff()
        return frozenset({"prefill", "decode"} if bool((lens == 1).any()) else {"prefill"})


# A stranger's may also give one sentence, or None for "supported".
Unsupported = Callable[[PagedBatch], list[str] | str | None]
Plan = Callable[[PagedBatch], Any]


@dataclass(frozen=True)
class Package:
    """An installed package that a kernel needs: its import name, how to get it, and a file that it must hold."""

    module: str
    install: str  # what to type after "pip install"
    file: str = ""  # glob below the module's folder; several builds may share one import name


@dataclass(frozen=True)
class KernelSpec:
    """A kernel as the registry lists it, without importing it. ``target`` is "module:attribute"."""

    name: str
    target: str
    phases: frozenset[Phase]
    summary: str
    requires: tuple[Package, ...] = ()
    compiler: bool = False  # needs a C++ compiler
    compiled_per_shape: bool = False  # takes seconds for every new shape: nothing to try in passing
    gpu: Literal["", "nvidia", "amd", "any"] = ""  # the GPU it cannot do without


@dataclass(frozen=True)
class Kernel:
    """A callable paged-attention kernel.

    ``kernel(batch)`` gives [T, Hq, Dv] in the query's dtype; ``kernel(batch, return_lse=True)`` gives
    ``(out, lse fp32 [T, Hq])``, natural logarithm, sink included. Raises ``TypeError`` where the kernel has no lse, and
    ``NotImplementedError`` for a limit found late. What ``plan`` gave may be passed as ``state``, so that it is not
    timed; ``out`` [T, Hq, Dv] is written to and returned where the kernel takes one.
    """

    name: str
    fn: Callable[..., Any]
    phases: frozenset[Phase] = ALL_PHASES
    declared_limits: Unsupported | None = None
    per_token_scales: bool = False  # takes k_scale and v_scale [NB, BS, Hkv] too
    stranger: bool = False  # not one of the registry: its launches are counted only where they are seen
    has_lse: bool = field(default=False)
    has_out: bool = field(default=False)
    plan_fn: Plan | None = None  # then ``fn`` takes what it gives as the keyword ``state``
    wants_finite_pool: bool = False  # its library never shows it NaN in slots without a token, and relies on it

    def unsupported(self, batch: PagedBatch) -> list[str]:
        """Reasons why this batch cannot be computed; empty if it can.

        A limit of one GPU is declared by asking ``target.target_of(batch)``. What is declared for a dtype, head_dim or
        target must be what the compiler refuses there: `pabench compile` holds the two against each other.
        """
        declared = None if self.declared_limits is None else self.declared_limits(batch)
        if declared is not None and not isinstance(declared, str | list | tuple):
            raise TypeError(f"unsupported() of '{self.name}' must return a list of reasons, got {declared!r}")
        reasons = [str(r) for r in ([declared] if isinstance(declared, str) else declared or ()) if str(r)]
        reasons += scale_limits(batch, self.per_token_scales)
        missing = batch.phases - self.phases
        if missing:
            reasons.append(f"{self.name} has no {' and no '.join(sorted(missing))} phase")
        return reasons

    def plan(self, batch: PagedBatch) -> Any:
        """What can be prepared before the call, e.g. another cache layout; None where there is nothing to prepare."""
        return None if self.plan_fn is None else self.plan_fn(batch)

    def __call__(
        self, batch: PagedBatch, *, return_lse: bool = False, state: Any = None, out: Tensor | None = None
    ) -> Any:
        note_entry(self.name)
        keywords: dict[str, Any] = {}
        if return_lse:
            if not self.has_lse:
                raise TypeError(f"kernel '{self.name}' returns no lse")
            keywords["return_lse"] = True
        if out is not None:
            if not self.has_out:
                raise TypeError(f"kernel '{self.name}' takes no out")
            keywords["out"] = out
        if self.plan_fn is not None:
            keywords["state"] = self.plan_fn(batch) if state is None else state
        return self.fn(batch, **keywords)


def scale_limits(batch: PagedBatch, per_token: bool) -> list[str]:
    """What is wrong with the shapes of ``k_scale`` and ``v_scale``, or too fine for a kernel without ``per_token``."""
    heads = batch.num_kv_heads
    allowed: list[tuple[int, ...]] = [(), (heads,)]
    if per_token:
        allowed.append((int(batch.key_cache.shape[0]), batch.block_size, heads))
    reasons = []
    for name, scale in (("k_scale", batch.k_scale), ("v_scale", batch.v_scale)):
        if scale is not None and tuple(scale.shape) not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            reasons.append(f"{name} must have shape {shapes}, got {list(scale.shape)}")
    return reasons


def kernel(
    name: str,
    *,
    phases: Iterable[Phase] = PHASES,
    unsupported: Unsupported | None = None,
    per_token_scales: bool = False,
    plan: Plan | None = None,
    wants_finite_pool: bool = False,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: make a launcher ``fn(batch, return_lse=False)`` a registered kernel.

    The launcher must call ``trace.count_launch(name)`` where it launches; every entry is counted here, also when one
    kernel calls another. With ``plan`` it is called as ``fn(batch, state=plan(batch))``.
    """

    def wrap(fn: Callable[..., Any]) -> Kernel:
        parameters = inspect.signature(fn).parameters
        return Kernel(
            name=name,
            fn=fn,
            phases=frozenset(phases),
            declared_limits=unsupported,
            per_token_scales=per_token_scales,
            has_lse="return_lse" in parameters,
            has_out="out" in parameters,
            plan_fn=plan,
            wants_finite_pool=wants_finite_pool,
        )

    return wrap
