"""What a case's output must be: the fp64 oracle, the honest error beside it, and exact counts; made once per inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pabench.checks.kernel.inputs import KernelInputs
from pabench.reference.oracle import attention_oracle, dense_attention, visible


@dataclass(frozen=True)
class Truth:
    """Row by row, in the order of the batch's tokens: all fp64 [T, Hq] but ``out`` [T, Hq, Dv]."""

    out: Tensor
    size: Tensor  # what an error is relative to
    lse: Tensor  # −inf in rows of empty sequences
    honest: Tensor  # error of same-dtype dense attention, relative to ``size``
    pooled: float  # its root mean square over the rows that see something
    seen: Tensor  # how many keys a row sees
    weight: Tensor  # the softmax denominator of a count: visible slots + e^sink
    quantization: float | None  # root mean square error that the cache's dtype makes, over the rows

    def rows(self, index: Tensor) -> Truth:
        """The truth of these rows alone; ``pooled`` stays that of the whole case."""
        names = ("out", "size", "lse", "honest", "seen", "weight")
        return replace(self, **{name: getattr(self, name)[index] for name in names})


def find_truth(inputs: KernelInputs) -> Truth:
    batch, shape, precision = inputs.batch, inputs.shape, inputs.precision
    device = batch.query.device
    heads, dim_v = batch.num_q_heads, batch.head_dim_v
    parts: list[tuple[Tensor, ...]] = []
    quantization: list[Tensor] = []
    begin = 0
    for s, (q, length) in enumerate(shape.seqs):
        query = batch.query[begin : begin + q]
        begin += q
        none = torch.zeros(q, heads, dtype=torch.float64, device=device)
        if length == 0:
            empty = torch.zeros(q, heads, dim_v, dtype=torch.float64, device=device)
            parts.append((empty, none, torch.full_like(none, -torch.inf), none, none, none))
            continue
        first = 0 if shape.window is None else max(0, length - q - shape.window + 1)
        positions = torch.arange(length - q, length, device=device) - first
        arguments: dict[str, Any] = {
            "query_positions": positions,
            "scale": batch.scale,
            "causal": batch.causal,
            "window": batch.sliding_window,
            "alibi_slopes": batch.alibi_slopes,
            "soft_cap": batch.logits_soft_cap,
            "sinks": batch.sinks,
        }
        key, value = inputs.keys[s][first:].to(device), inputs.values[s][first:].to(device)
        oracle = attention_oracle(query, key, value, **arguments)
        size = oracle.size.clamp_min(torch.finfo(torch.float64).tiny)
        honest = torch.stack([(d.double() - oracle.out).norm(dim=-1) for d in _dense(query, key, value, arguments)])
        honest = (honest.amax(0) / size).nan_to_num(torch.inf)
        seen = visible(positions, length - first, causal=batch.causal, window=batch.sliding_window)
        number = seen.sum(-1, keepdim=True).double().expand(-1, heads)
        weight = number if batch.sinks is None else number + batch.sinks.double().exp()
        parts.append((oracle.out, oracle.size, oracle.lse, honest, number, weight))
        if precision.quantized and not inputs.exact:
            content = inputs.contents[s]
            plain = attention_oracle(
                query, content.key[first:].to(device), content.value[first:].to(device), **arguments
            )
            quantization.append(((oracle.out - plain.out).norm(dim=-1) / size).flatten())
    out, size, lse, honest, number, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    errors = honest[size > 0]
    return Truth(
        out=out,
        size=size,
        lse=lse,
        honest=honest,
        pooled=float(errors.square().mean().sqrt()) if errors.numel() else 0.0,
        seen=number,
        weight=weight,
        quantization=float(torch.cat(quantization).square().mean().sqrt()) if quantization else None,
    )


def _dense(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Honest same-dtype attention, twice: every step in the dtype, and only inputs and output rounded to it.

    One of them alone is lucky at times, above all where a case has few rows.
    """
    dtype = query.dtype
    yield dense_attention(query, key, value, **arguments)
    if dtype != torch.float32:
        rounded = (x.to(dtype).float() for x in (query, key, value))
        yield dense_attention(*rounded, **arguments).to(dtype)
