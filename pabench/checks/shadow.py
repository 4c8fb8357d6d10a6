"""Shadow mode: every attention call of the model, on its own activations, against the fp64 oracle.

K and V are kept beside the block pool as the model made them, so that a wrong cache write or block table shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pabench.checks.tolerance import allowed
from pabench.engine.kv_cache import KVScales
from pabench.engine.step import StepMetadata, Work
from pabench.reference.oracle import OracleOutput, attention_oracle, dense_attention
from pabench_kernels.cache_write import dequantize, quantize
from pabench_kernels.contract import PagedBatch

if TYPE_CHECKING:
    from pabench.engine.engine import PagedEngine


@dataclass(frozen=True)
class WorstRow:
    """Where the error is largest in units of its tolerance."""

    layer: int
    phase: str
    step: int
    seq: int
    token: int
    q_head: int
    dim: int


@dataclass(frozen=True)
class _Call:
    """One sequence's rows of one attention call: errors relative to ``size``, fp64 [T, Hq]."""

    layer: int
    phase: str
    step: int
    seq: int
    batch: int  # sequences of the step
    start: int
    error: Tensor
    honest: Tensor
    finite: Tensor  # bool [T, Hq]
    worst_dim: Tensor  # int64 [T, Hq]
    max_abs: float


@dataclass(frozen=True)
class SeenCall:
    """One sequence's part of an attention call while it is judged: for those who look closer at the first bad one."""

    layer: int
    step: int
    seq_index: int  # row of the batch
    rows: slice  # of the packed batch
    work: Work
    metadata: StepMetadata | None  # None where there is no engine
    batch: PagedBatch
    key: Tensor  # [L, Hkv, D]: what the cache should give back, fp32 where quantised
    value: Tensor
    out: Tensor  # [T, Hq, Dv]
    truth: Tensor  # fp64 [T, Hq, Dv]: the oracle's output
    size: Tensor  # fp64 [T, Hq]: what an error is relative to
    allowed: Tensor  # fp64 [T, Hq]: the relative error that is tolerated, by this call's own honest errors

    def ratio(self, out: Tensor) -> Tensor:
        """Error over tolerance of some output [T, Hq, Dv]; infinite where it is not finite."""
        off: Tensor = (out.double() - self.truth).norm(dim=-1) / (self.allowed * self.size)
        return off.nan_to_num(torch.inf, torch.inf)

    @property
    def phase(self) -> str:
        return _phase(self.work)


def _phase(work: Work) -> str:
    return "decode" if len(work.tokens) == 1 else "prefill"


@dataclass(frozen=True)
class ShadowReport:
    """The three-way rule over all rows of a case."""

    rows: int
    rel_l2_max: float
    honest_error: float  # the same-dtype dense error, root mean square over the case
    ratio: float  # largest error in units of its tolerance: above 1 is a failure
    max_abs: float
    nonfinite: int
    worst: WorstRow | None
    first_layer: int | None  # lowest layer with a failing row
    first_step: int | None
    failing_layers: tuple[int, ...]
    failing_heads: tuple[int, ...]

    @property
    def passed(self) -> bool:
        return self.rows > 0 and self.ratio <= 1.0 and self.nonfinite == 0


def _size(oracle: OracleOutput) -> Tensor:
    return oracle.size.clamp_min(torch.finfo(torch.float64).tiny)


def _pooled(calls: Sequence[_Call]) -> float:
    return float(torch.cat([c.honest.flatten() for c in calls]).square().mean().sqrt())


def _ratio(call: _Call, pooled: float, dtype: torch.dtype) -> Tensor:
    """Error over tolerance [T, Hq]; infinite where the output is not finite."""
    ratio = call.error / allowed(call.honest, pooled, dtype)
    return torch.where(call.finite, ratio, torch.inf).nan_to_num(torch.inf, torch.inf)


@dataclass
class ShadowObserver:
    """Hold each attention call of a paged engine against the oracle.

    ``watch`` is shown every call as it happens; the tensors of a ``SeenCall`` are the live ones.
    """

    kv_dtype: torch.dtype
    scales: KVScales | None = None
    watch: Callable[[SeenCall], None] | None = None
    forked_at: dict[int, int] = field(default_factory=dict)  # child -> tokens it shares with its parent
    _parents: dict[int, int] = field(default_factory=dict)
    _past: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _calls: list[_Call] = field(default_factory=list)
    _steps: int = 0
    _last_step: StepMetadata | None = None

    def __call__(
        self, *, layer: int, step: StepMetadata, batch: PagedBatch, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        if step is not self._last_step:
            self._last_step, self._steps = step, self._steps + 1
        begin = 0
        for index, work in enumerate(step.work):
            rows = slice(begin, begin + len(work.tokens))
            begin = rows.stop
            past = self._past.get((layer, work.seq_id))
            if work.start > 0 and past is None:
                continue
            k, v = self._stored(layer, key[rows], value[rows])
            if past is not None:
                k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
            self._past[layer, work.seq_id] = (k, v)
            call, oracle = self._judge(layer, _phase(work), work.seq_id, work.start, batch, rows, k, v, out[rows])
            self._calls.append(call)
            if self.watch is not None:
                pooled = float(call.honest.square().mean().sqrt())
                limit = allowed(call.honest, pooled, batch.query.dtype)
                seen = SeenCall(
                    layer, call.step, index, rows, work, step, batch, k, v, out[rows], oracle.out, _size(oracle), limit
                )
                self.watch(seen)

    def fork(self, parent: int, child: int) -> None:
        """``child`` has the past of ``parent``, as after ``PagedEngine.fork``."""
        for (layer, seq), past in list(self._past.items()):
            if seq == parent:
                self._past[layer, child] = past
                self.forked_at[child] = len(past[0])
        self._parents[child] = parent

    def forked_from(self, seq: int) -> list[int]:
        """Parent, its parent, and so on."""
        line = []
        while seq in self._parents:
            seq = self._parents[seq]
            line.append(seq)
        return line

    def forget(self, seq: int) -> None:
        """Drop what is kept of a freed sequence."""
        self._past = {key: past for key, past in self._past.items() if key[1] != seq}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the K and V kept beside the pool."""
        return sum(t.nbytes for kept in self._past.values() for t in kept)

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.kv_dtype if self.scales is None else torch.float32

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as the cache would give them back, exactly (fp32 where quantised)."""
        if self.scales is None:
            return key.to(self.kv_dtype), value.to(self.kv_dtype)
        scale_k, scale_v = self.scales.k[layer], self.scales.v[layer]
        return (
            dequantize(quantize(key, self.kv_dtype, scale_k), scale_k, torch.float32),
            dequantize(quantize(value, self.kv_dtype, scale_v), scale_v, torch.float32),
        )

    def _judge(
        self,
        layer: int,
        phase: str,
        seq: int,
        start: int,
        batch: PagedBatch,
        rows: slice,
        k: Tensor,
        v: Tensor,
        out: Tensor,
    ) -> tuple[_Call, OracleOutput]:
        query = batch.query[rows]
        positions = torch.arange(start, start + len(query), device=query.device)
        first = 0  # keys behind the window of every query need not be looked at
        if batch.sliding_window is not None:
            first = max(0, start - batch.sliding_window + 1)
        arguments = {
            "query_positions": positions - first,
            "scale": batch.scale,
            "causal": batch.causal,
            "window": batch.sliding_window,
            "alibi_slopes": batch.alibi_slopes,
            "soft_cap": batch.logits_soft_cap,
            "sinks": batch.sinks,
        }
        oracle = attention_oracle(query, k[first:], v[first:], **arguments)  # type: ignore[arg-type]
        honest = dense_attention(query, k[first:], v[first:], **arguments)  # type: ignore[arg-type]
        difference = out.double() - oracle.out
        size = _size(oracle)
        call = _Call(
            layer=layer,
            phase=phase,
            step=self._steps - 1,
            seq=seq,
            batch=batch.num_seqs,
            start=start,
            error=difference.norm(dim=-1) / size,
            honest=(honest.double() - oracle.out).norm(dim=-1) / size,
            finite=out.isfinite().all(-1),
            worst_dim=difference.abs().nan_to_num(torch.inf, torch.inf).argmax(-1),
            max_abs=float(difference.abs().max()),
        )
        return call, oracle

    def calls(self) -> Iterator[tuple[int, int, str]]:
        """(layer, step, phase) of every judged call."""
        return ((c.layer, c.step, c.phase) for c in self._calls)

    def facts(self, dtype: torch.dtype) -> Iterator[tuple[dict[str, str | int], bool]]:
        """Of every judged call: what may matter of it, and whether it has a wrong row."""
        if not self._calls:
            return
        pooled = _pooled(self._calls)
        for c in self._calls:
            known: dict[str, str | int] = {"phase": c.phase, "layer": c.layer, "length": c.start + len(c.error)}
            known |= {"cached past": "some" if c.start else "none", "batch size": c.batch}
            yield known, bool((_ratio(c, pooled, dtype) > 1).any())

    def report(self, dtype: torch.dtype) -> ShadowReport:
        """Judge all rows; ``dtype`` is the query's."""
        if not self._calls:
            return ShadowReport(0, 0.0, 0.0, 0.0, 0.0, 0, None, None, None, (), ())
        pooled = _pooled(self._calls)
        worst, largest, rel_max = None, -1.0, 0.0
        failing: list[tuple[int, int, int]] = []
        for call in self._calls:
            ratio = _ratio(call, pooled, dtype)
            bad = (ratio > 1).any(0)
            failing += [(call.layer, call.step, int(h)) for h in torch.nonzero(bad).flatten()]
            rel_max = max(rel_max, float(torch.where(call.finite, call.error, torch.inf).max()))
            if float(ratio.max()) > largest:
                largest = float(ratio.max())
                token, head = divmod(int(ratio.argmax()), ratio.shape[1])
                worst = WorstRow(
                    call.layer,
                    call.phase,
                    call.step,
                    call.seq,
                    call.start + token,
                    head,
                    int(call.worst_dim[token, head]),
                )
        return ShadowReport(
            rows=sum(c.honest.numel() for c in self._calls),
            rel_l2_max=rel_max,
            honest_error=pooled,
            ratio=largest,
            max_abs=max((c.max_abs for c in self._calls), key=lambda x: (x != x, x)),
            nonfinite=int(sum((~c.finite).sum() for c in self._calls)),
            worst=worst,
            first_layer=min((f[0] for f in failing), default=None),
            first_step=min((f[1] for f in failing), default=None),
            failing_layers=tuple(sorted({f[0] for f in failing})),
            failing_heads=tuple(sorted({f[2] for f in failing})),
        )


# Is shown every attention call of an engine, live.
Watch = Callable[["PagedEngine", ShadowObserver, SeenCall], None]
