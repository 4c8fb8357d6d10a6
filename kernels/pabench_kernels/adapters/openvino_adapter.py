"""OpenVINO's PagedAttentionExtension on its CPU plugin, built as a model of this one node.

A private class without a promise of stability; what stands here was found with release 2026.4.1, whose error messages
name its 28 inputs. It takes the new tokens' K and V beside the cache [NB, Hkv, 32, D] and writes them into it: into the
copy that ``plan`` makes. It knows no padding rows, so sequences of length 0 are left out of what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "openvino"
BLOCK_SIZE = 32
LIMITS = Limits(
    NAME,
    "OpenVINO's PagedAttention",
    dtypes=(torch.float32, torch.float16),
    block_sizes=(BLOCK_SIZE,),
    alibi=True,
    sinks=True,
    window=True,
    device="cpu",
)
MAX_MODELS = 64  # compiled ones that are kept: a model is compiled in a tenth of a second
RELEASE = "2026.4"
_TYPES = {torch.float32: "f32", torch.float16: "f16"}
# what this adapter never asks for: name → (numpy dtype, shape); all zero
_UNUSED_BEFORE_SINKS = (
    ("score_aggregation_window", "i4", (0,)),
    ("rotated_block_indices", "i4", (0,)),
    ("rotation_deltas", "i4", (0, 0)),
    ("rotation_trig_lut", "f4", (0, 0)),
    ("xattention_threshold", "f4", (0,)),
    ("xattention_block_size", "i4", ()),
    ("xattention_stride", "i4", ()),
)
_UNUSED_AFTER_SINKS = (
    ("adaptive_rkv_start_size", "i4", ()),
    ("adaptive_rkv_evictable_sizes", "i4", (0,)),
    ("adaptive_rkv_diversity_block_set_indices", "i4", (0,)),
    ("adaptive_rkv_diversity_block_set_indices_begins", "i4", (0,)),
    ("token_type_ids", "i4", (0, 0)),
    ("qq_bias", "u1", (0,)),
    ("qq_bias_begins", "i4", (0,)),
)


@dataclass(frozen=True)
class _State:
    request: Any
    inputs: list[Any]  # numpy arrays, in the order of the model's parameters
    kept: Tensor  # the packed tokens that belong to a sequence which is not empty


def _unsupported(batch: PagedBatch) -> list[str]:
    reasons = LIMITS.reasons(batch)
    if not reasons:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("openvino")
        except PackageNotFoundError:
            found = "unknown"
        if not found.startswith(RELEASE):
            reasons.append(f"its PagedAttention is private, and only release {RELEASE} is known here, got {found}")
        if batch.max_seq_len == 0:
            reasons.append("OpenVINO's PagedAttention knows no padding rows, and this batch has no others")
    return reasons


def _plan(batch: PagedBatch) -> _State:
    size = batch.block_size
    lens, starts = batch.seq_lens.long(), batch.query_start_loc.long()
    counts = starts.diff()
    seqs = torch.repeat_interleave(torch.arange(batch.num_seqs), counts)
    positions = torch.arange(batch.num_tokens) - starts[seqs] + (lens - counts)[seqs]
    kept = (lens[seqs] > 0).nonzero().flatten()
    blocks = batch.block_table[seqs[kept], positions[kept] // size].long()
    offsets = positions[kept] % size
    own = lens > 0
    used = -(-lens[own] // size)
    table = batch.block_table[own]
    indices = torch.cat([row[: int(n)] for row, n in zip(table, used, strict=True)]).clamp(min=0)
    keys, values = batch.key_cache, batch.value_cache
    tensors = [
        batch.query[kept].flatten(1),
        keys[blocks, offsets].flatten(1),
        values[blocks, offsets].flatten(1),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        (lens - counts)[own].int(),
        torch.cat([torch.zeros(1, dtype=torch.long), counts[own].cumsum(0)]).int(),
        indices.int(),
        torch.cat([torch.zeros(1, dtype=torch.long), used.cumsum(0)]).int(),
        torch.tensor(batch.max_seq_len, dtype=torch.int32),
    ]
    compiled = _compiled(
        batch.query.dtype,
        (batch.num_q_heads, batch.num_kv_heads, batch.head_dim),
        batch.scale,
        batch.sliding_window or 0,
        () if batch.alibi_slopes is None else tuple(batch.alibi_slopes.tolist()),
        () if batch.sinks is None else tuple(batch.sinks.tolist()),
        torch.get_num_threads(),
    )
    inputs = [x.clone(memory_format=torch.contiguous_format).numpy() for x in tensors]
    return _State(compiled.create_infer_request(), inputs, kept)


@kernel(NAME, unsupported=_unsupported, plan=_plan, wants_finite_pool=True)
def openvino(batch: PagedBatch, *, state: _State) -> Tensor:
    """Paged attention of any causal batch, phases mixed or not: [T, Hq, D] in the query's dtype; empty ones are 0."""
    out = torch.zeros(batch.num_tokens, batch.num_q_heads, batch.head_dim, dtype=batch.query.dtype)
    count_launch(NAME)
    found = state.request.infer(state.inputs, share_inputs=True, share_outputs=True)
    out[state.kept] = torch.from_numpy(found[0].copy()).view(-1, batch.num_q_heads, batch.head_dim)
    return out


@lru_cache(MAX_MODELS)
def _compiled(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    scale: float,
    window: int,
    slopes: tuple[float, ...],
    sinks: tuple[float, ...],
    threads: int,
) -> Any:
    """The model of one node, compiled for the CPU. A window of 0 is none."""
    import numpy
    import openvino as ov
    from openvino.op import _PagedAttentionExtension

    q_heads, kv_heads, dim = heads
    kind = getattr(ov.Type, _TYPES[dtype])

    def given(element: Any, *shape: int) -> Any:
        return ov.op.Parameter(element, ov.PartialShape(list(shape)))

    def constant(value: Any, dtype: str) -> Any:
        return ov.op.Constant(numpy.asarray(value, dtype=dtype))

    def unused(inputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> list[Any]:
        return [ov.op.Constant(numpy.zeros(shape, dtype)) for _, dtype, shape in inputs]

    pool = (-1, kv_heads, BLOCK_SIZE, dim)
    tokens = [given(kind, -1, n * dim) for n in (q_heads, kv_heads, kv_heads)]
    lists = [given(ov.Type.i32, -1) for _ in range(4)]
    longest = given(ov.Type.i32)
    parameters = [*tokens, given(kind, *pool), given(kind, *pool), *lists, longest]
    node = _PagedAttentionExtension(
        [
            x.output(0)
            for x in (
                *parameters[:-1],
                constant(scale, "f4"),
                constant(window, "i4"),
                constant(slopes, "f4"),
                longest,
                *unused(_UNUSED_BEFORE_SINKS),
                constant(numpy.reshape(sinks, (1, -1, 1, 1)) if sinks else (), "f4"),
                *unused(_UNUSED_AFTER_SINKS),
            )
        ]
    )
    shape = {"num_k_heads": kv_heads, "k_head_size": dim, "num_v_heads": kv_heads, "v_head_size": dim}
    for name, value in shape.items():
        node.get_rt_info()[name] = value
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": _TYPES[dtype], "INFERENCE_NUM_THREADS": threads}
    return ov.Core().compile_model(ov.Model([node.output(0)], parameters, "paged_attention"), "CPU", options)
