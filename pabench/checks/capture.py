"""Writes a few attention calls of a model case as captures: real queries, keys and values, sinks and all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pabench.capture.meta import VERSION, CaptureMeta
from pabench.capture.tensors import write_capture
from pabench.engine.step import StepMetadata
from pabench_kernels.contract import PagedBatch

MAX_QUERY_TOKENS = 16  # the last ones of a prefill
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class CaptureObserver:
    """Sees every attention call of a paged engine and keeps the last prefill and decode call of sequence ``seq_id``.

    ``write`` stores those of the first, the middle and the last layer, and of one layer with another window.
    """

    folder: Path
    model: str
    seq_id: int
    _past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _calls: dict[tuple[int, str], tuple[PagedBatch, Tensor, int]] = field(default_factory=dict)

    def __call__(
        self, *, layer: int, step: StepMetadata, batch: PagedBatch, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        begin = 0
        for work in step.work:
            rows = slice(begin, begin + len(work.tokens))
            begin = rows.stop
            if work.seq_id != self.seq_id:
                continue
            k, v = key[rows], value[rows]
            if work.start > 0:
                if layer not in self._past:
                    continue
                k, v = torch.cat([self._past[layer][0], k]), torch.cat([self._past[layer][1], v])
            self._past[layer] = (k, v)
            phase = "decode" if len(work.tokens) == 1 else "prefill"
            self._calls[layer, phase] = (batch, batch.query[rows][-MAX_QUERY_TOKENS:], len(k))

    def write(self) -> list[Path]:
        """The metadata files written."""
        written = []
        for layer in self._chosen():
            for phase in ("prefill", "decode"):
                if (layer, phase) in self._calls:
                    written.append(self._write(layer, phase))
        return written

    def _chosen(self) -> list[int]:
        layers = sorted(self._past)
        if not layers:
            return []
        windows = {layer: call[0].sliding_window for (layer, _), call in self._calls.items()}
        other = [layer for layer in layers if windows[layer] != windows[layers[0]]]
        return sorted({layers[0], layers[len(layers) // 2], layers[-1], *other[:1]})

    def _write(self, layer: int, phase: str) -> Path:
        batch, query, length = self._calls[layer, phase]
        key, value = (x[:length] for x in self._past[layer])
        dtype = _DTYPES[query.dtype]
        meta = CaptureMeta.model_validate(
            {
                "version": VERSION,
                "model": self.model,
                "layer": layer,
                "phase": phase,
                "dtype": dtype,
                "query_tokens": len(query),
                "length": length,
                "q_heads": query.shape[1],
                "kv_heads": key.shape[1],
                "head_dim": key.shape[2],
                "head_dim_v": value.shape[2],
                "scale": float(batch.scale),
                "causal": batch.causal,
                "window": batch.sliding_window,
                "soft_cap": batch.logits_soft_cap,
                "sinks": batch.sinks is not None,
                "alibi": batch.alibi_slopes is not None,
            }
        )
        tensors = {"query": query, "key": key.to(query.dtype), "value": value.to(query.dtype)}
        for name in ("sinks", "alibi_slopes"):
            if (given := getattr(batch, name)) is not None:
                tensors[name] = given.float()
        path = self.folder / f"{self.model.replace('/', '-')}-{dtype}-layer{layer}-{phase}.json"
        write_capture(path, meta, tensors)
        return path
