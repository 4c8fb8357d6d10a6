"""Shadow mode: every attention call of the model, on its own activations, against the fp64 oracle.

K and V are kept beside the block pool as the model made them, so that a wrong cache write or block table shows too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pabench.checks.tolerance import allowed
from pabench.engine.kv_cache import KVScales
from pabench.engine.step import StepMetadata
from pabench.reference.oracle import attention_oracle, dense_attention
from pabench_kernels.cache_write import dequantize, quantize
from pabench_kernels.contract import PagedBatch


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
    start: int
    error: Tensor
    honest: Tensor
    finite: Tensor  # bool [T, Hq]
    worst_dim: Tensor  # int64 [T, Hq]
    max_abs: float


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


@dataclass
class ShadowObserver:
    """Hold each attention call of a paged engine against the oracle; forks, not seen from their start, are skipped."""

    kv_dtype: torch.dtype
    scales: KVScales | None = None
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
        for work in step.work:
            rows = slice(begin, begin + len(work.tokens))
            begin = rows.stop
            past = self._past.get((layer, work.seq_id))
            if work.start > 0 and past is None:
                continue
            k, v = self._stored(layer, key[rows], value[rows])
            if past is not None:
                k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
            self._past[layer, work.seq_id] = (k, v)
            phase = "decode" if len(work.tokens) == 1 else "prefill"
            self._calls.append(self._judge(layer, phase, work.seq_id, work.start, batch, rows, k, v, out[rows]))

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
    ) -> _Call:
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
        size = oracle.size.clamp_min(torch.finfo(torch.float64).tiny)
        return _Call(
            layer=layer,
            phase=phase,
            step=self._steps - 1,
            seq=seq,
            start=start,
            error=difference.norm(dim=-1) / size,
            honest=(honest.double() - oracle.out).norm(dim=-1) / size,
            finite=out.isfinite().all(-1),
            worst_dim=difference.abs().nan_to_num(torch.inf, torch.inf).argmax(-1),
            max_abs=float(difference.abs().max()),
        )

    def calls(self) -> Iterator[tuple[int, int, str]]:
        """(layer, step, phase) of every judged call."""
        return ((c.layer, c.step, c.phase) for c in self._calls)

    def report(self, dtype: torch.dtype) -> ShadowReport:
        """Judge all rows; ``dtype`` is the query's."""
        if not self._calls:
            return ShadowReport(0, 0.0, 0.0, 0.0, 0.0, 0, None, None, None, (), ())
        honest = torch.cat([c.honest.flatten() for c in self._calls])
        pooled = float(honest.square().mean().sqrt())
        worst, largest, rel_max = None, -1.0, 0.0
        failing: list[tuple[int, int, int]] = []
        for call in self._calls:
            ratio = call.error / allowed(call.honest, pooled, dtype)
            ratio = torch.where(call.finite, ratio, torch.inf).nan_to_num(torch.inf, torch.inf)
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
            rows=honest.numel(),
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
