"""Shape × probe × precision → a PagedBatch, and beside it each sequence's K and V as plain tensors for the oracle.

Block ids are unique, shuffled and never in order; what may not be read is filled with what would show.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pabench.cases import Precision
from pabench.checks.kernel.pool import SPARE_BLOCKS, border_block, carrier, make_pool, write
from pabench.checks.kernel.probes import PROBES, Content, Probe
from pabench.checks.kernel.shapes import Shape
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.cache_write import dequantize, per_head, quantize
from pabench_kernels.contract import PagedBatch

ODD_SCALE = 0.83  # × 1/√head_dim
_PADDINGS = ("unused", "zero", "stale")  # what unused columns of the block table hold: −1, 0, a block nobody owns


@dataclass(frozen=True)
class KernelInputs:
    """One case's inputs. ``keys`` and ``values`` [L, Hkv, D] hold what the cache gives back, in fp32 or its dtype.

    ``base`` are the tensors a kernel could write to, whole pools and not views of them.
    """

    shape: Shape
    probe: Probe
    precision: Precision
    batch: PagedBatch
    contents: tuple[Content, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    stored_k: tuple[Tensor, ...]  # as they lie in the pool, before their scales
    stored_v: tuple[Tensor, ...]
    base: dict[str, Tensor]

    @cached_property
    def snapshot(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.base.items()}

    @property
    def ordinary_pool(self) -> bool:
        """Whether neither strides nor high ids can lead a kernel astray."""
        return self.shape.layout == "plain" and self.shape.border == "none"

    @property
    def exact(self) -> bool:
        """Whether slots can be counted: factors per token weigh them differently."""
        return self.probe.exact and self.shape.scales != "token"

    def rows(self, order: Sequence[int]) -> Tensor:
        """Indices of the packed query tokens of these sequences, in this order."""
        starts = [0, *accumulate(q for q, _ in self.shape.seqs)]
        picked = [torch.arange(starts[s], starts[s + 1]) for s in order]
        return torch.cat(picked).to(self.batch.query.device)

    def picked(self, order: Sequence[int]) -> KernelInputs:
        """The same sequences, or some of them, in another order over the same pool."""
        batch, seqs = self.batch, tuple(self.shape.seqs[s] for s in order)
        index = torch.tensor(list(order), device=batch.query.device)
        starts = torch.tensor([0, *accumulate(q for q, _ in seqs)], dtype=torch.int32, device=batch.query.device)
        changed: dict[str, Any] = {
            "query": batch.query[self.rows(order)],
            "block_table": batch.block_table[index],
            "seq_lens": batch.seq_lens[index],
            "query_start_loc": starts,
        }
        batch = replace(
            batch, **changed, max_query_len=max(q for q, _ in seqs), max_seq_len=max(length for _, length in seqs)
        )
        names = ("contents", "keys", "values", "stored_k", "stored_v")
        parts: dict[str, Any] = {name: tuple(getattr(self, name)[s] for s in order) for name in names}
        shape = replace(self.shape, seqs=seqs)
        return replace(self, shape=shape, batch=batch, base={**self.base, **changed}, **parts)

    def changed(self) -> list[str]:
        """Names of the inputs whose bytes are no longer those of the snapshot; they are put back."""
        wrong = [n for n, x in self.base.items() if not torch.equal(_bytes(x), _bytes(self.snapshot[n]))]
        for name in wrong:
            raw = carrier(self.base[name].dtype)
            self.base[name].view(raw).copy_(self.snapshot[name].view(raw))
        return wrong


def build(shape: Shape, probe_name: str, precision: Precision, seed: int, device: str = "cpu") -> KernelInputs:
    """Inputs of one case; the same for the same arguments. A quantised cache always has scales."""
    probe = PROBES[probe_name]
    digest = hashlib.sha256(f"{seed}:{shape.batch_spec}:{probe_name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    dtype, kv_dtype = TORCH_DTYPES[precision.dtype], TORCH_DTYPES[precision.kv_dtype]
    heads = shape.group * shape.kv_heads
    scale = shape.scale or (ODD_SCALE if shape.odd_scale else 1.0) / math.sqrt(shape.head_dim)
    contents = tuple(probe.make(shape, s, rng, scale) for s in range(len(shape.seqs)))
    k_scale, v_scale = _scales(shape, precision, contents)
    token_k, token_v = (_token_scales(shape, scale, rng) for scale in (k_scale, v_scale))  # of each sequence
    if probe.integers and v_scale is not None:
        contents = tuple(replace(c, value=c.value * per_head(t)) for c, t in zip(contents, token_v, strict=True))
    stored_k = [quantize(c.key, kv_dtype, t) for c, t in zip(contents, token_k, strict=True)]
    stored_v = [quantize(c.value, kv_dtype, t) for c, t in zip(contents, token_v, strict=True)]
    keys, values = (
        tuple(x if t is None else dequantize(x, t) for x, t in zip(stored, scales, strict=True))
        for stored, scales in ((stored_k, token_k), (stored_v, token_v))
    )
    table, owned = _block_table(shape, rng, digest[8], kv_dtype.itemsize)
    num_blocks = int(owned.shape[0])
    pool = make_pool(shape, num_blocks, kv_dtype, probe.overlay, rng, device)
    for s in range(len(shape.seqs)):
        for cache, stored in ((pool.key_cache, stored_k[s]), (pool.value_cache, stored_v[s])):
            write(cache, stored.to(device), table[s], shape.block_size)
    if shape.scales == "token":
        k_scale, v_scale = (_scale_pool(shape, num_blocks, parts, table) for parts in (token_k, token_v))
    table = _free_behind_window(shape, table, owned)
    query = torch.cat([c.query for c in contents]).to(dtype)
    if shape.layout == "padded":
        wide = torch.full((query.shape[0], heads + 1, shape.head_dim + 8), math.nan, dtype=dtype)
        wide[:, :heads, : shape.head_dim] = query
        query_base = wide.to(device)
        query = query_base[:, :heads, : shape.head_dim]
    else:
        query = query_base = query.contiguous().to(device)
    slopes = None
    if shape.alibi:  # off where slots are counted, but the argument is there
        slopes = torch.zeros(heads) if probe.exact else 0.5 ** torch.linspace(1, 7, heads)
    optional = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": slopes,
        "sinks": _sinks(shape, probe, rng) if shape.sinks else None,
    }
    optional |= contents[0].given
    tensors = {name: x.to(device) for name, x in optional.items() if x is not None}
    tensors["block_table"] = table.to(device)
    tensors["seq_lens"] = torch.tensor([s for _, s in shape.seqs], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *(q for q, _ in shape.seqs)]).cumsum(0)
    tensors["query_start_loc"] = starts.to(torch.int32).to(device)
    batch = PagedBatch(
        query=query,
        key_cache=pool.key_cache,
        value_cache=pool.value_cache,
        max_query_len=max(q for q, _ in shape.seqs),
        max_seq_len=max(s for _, s in shape.seqs),
        scale=scale,
        causal=shape.causal,
        sliding_window=shape.window,
        logits_soft_cap=shape.cap,
        **tensors,
    )
    return KernelInputs(
        shape=shape,
        probe=probe,
        precision=precision,
        batch=batch,
        contents=contents,
        keys=keys,
        values=values,
        stored_k=tuple(stored_k),
        stored_v=tuple(stored_v),
        base={"query": query_base, "key_cache": pool.base_k, "value_cache": pool.base_v, **tensors},
    )


def _token_scales(shape: Shape, scale: Tensor | None, rng: torch.Generator) -> list[Any]:
    """The factors of each sequence: [] or [Hkv] for all of its tokens, or [L, Hkv] around ``scale`` per token."""
    if scale is None or shape.scales != "token":
        return [scale] * len(shape.seqs)
    return [scale * (0.6 + torch.rand(length, shape.kv_heads, generator=rng)) for _, length in shape.seqs]


def _scale_pool(shape: Shape, num_blocks: int, parts: Sequence[Tensor], table: Tensor) -> Tensor:
    """Per-token factors where the tokens lie, fp32 [NB, BS, Hkv]; NaN where nobody's token lies."""
    pool = torch.full((num_blocks, shape.block_size, shape.kv_heads), math.nan)
    for part, blocks in zip(parts, table, strict=True):
        write(pool, part.float(), blocks, shape.block_size)
    return pool


def _scales(shape: Shape, precision: Precision, contents: tuple[Content, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Dequantisation factors of K and of V: never 1, never powers of two, never alike; they fit the largest number."""
    kind = shape.scales
    if kind == "none" and not precision.quantized:
        return None, None
    if shape.capture is not None:  # a model's numbers fill the range, as calibration would have it
        top = 127.0 if precision.kv_dtype == "int8" else torch.finfo(TORCH_DTYPES[precision.kv_dtype]).max
        amax = [
            max(float(x.abs().max()) for x in part) for part in ([c.key for c in contents], [c.value for c in contents])
        ]
        return torch.tensor(amax[0] / top), torch.tensor(amax[1] / top)
    factors = []
    for factor, part in ((0.37, [c.key for c in contents]), (0.61, [c.value for c in contents])):
        if precision.kv_dtype == "int8":
            largest = max((float(x.abs().max()) for x in part if x.numel()), default=1.0)
            factor = largest / 101 * (1.0 if factor < 0.5 else 1.13)
        factors.append(factor)
    if kind == "head":
        steps = 1 + 0.37 * torch.arange(shape.kv_heads) % 2.9
        return factors[0] * steps, factors[1] * steps.flip(0)
    return torch.tensor(factors[0]), torch.tensor(factors[1])


def _sinks(shape: Shape, probe: Probe, rng: torch.Generator) -> Tensor:
    """About as heavy as all keys of the longest sequence together; e^sink is an integer where slots are counted."""
    heads, length = shape.group * shape.kv_heads, max(s for _, s in shape.seqs)
    if probe.exact:
        return (2 + torch.arange(heads) % 5 + length // 2).float().log()
    return math.log(max(length, 2)) + torch.randn(heads, generator=rng)


def _block_table(shape: Shape, rng: torch.Generator, choice: int, itemsize: int) -> tuple[Tensor, Tensor]:
    """Block table int32 [S, columns] and, per block, which sequence owns it (−1: nobody)."""
    used = [-(-length // shape.block_size) for _, length in shape.seqs]
    border = border_block(shape, itemsize)
    if border is None:
        num_blocks = sum(used) + SPARE_BLOCKS
        ids = 1 + torch.randperm(num_blocks - 2, generator=rng)  # neither the first nor the last is ever owned
    else:  # ids on both sides of it
        first = border - sum(used) // 2
        num_blocks = border + sum(used) + SPARE_BLOCKS
        ids = torch.cat([first + torch.randperm(sum(used), generator=rng), torch.tensor([num_blocks - 2])])
    owned = torch.full((num_blocks,), -1)
    padding = {"unused": -1, "zero": 0, "stale": int(ids[-1])}[_PADDINGS[choice % len(_PADDINGS)]]
    table = torch.full((len(used), max(used) + 2), padding, dtype=torch.int32)
    begin = 0
    for s, n in enumerate(used):
        table[s, :n] = ids[begin : begin + n]
        owned[ids[begin : begin + n]] = s
        begin += n
    return table, owned


def _free_behind_window(shape: Shape, table: Tensor, owned: Tensor) -> Tensor:
    """Entries of blocks behind the window of every query become −1 or stale, as engines leave them."""
    if shape.window is None:
        return table
    for s, (q, length) in enumerate(shape.seqs):
        first = max(0, length - q - shape.window + 1)
        table[s, : first // shape.block_size] = -1 if s % 2 else int((owned < 0).nonzero()[-1])
    return table


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
