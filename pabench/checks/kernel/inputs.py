"""Shape × probe × precision → a PagedBatch, and beside it each sequence's K and V as plain tensors for the oracle.

Block ids are unique, shuffled and never in order; what may not be read is filled with what would show.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pabench.cases import Precision
from pabench.checks.kernel.probes import PROBES, Content, Overlay, Probe
from pabench.checks.kernel.shapes import Shape
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.cache_write import dequantize, per_head, quantize
from pabench_kernels.contract import PagedBatch

SPARE_BLOCKS = 5  # blocks nobody owns, the first and the last of the pool among them
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
    base: dict[str, Tensor]

    @cached_property
    def snapshot(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.base.items()}

    def changed(self) -> list[str]:
        """Names of the inputs whose bytes are no longer those of the snapshot; they are put back."""
        wrong = [n for n, x in self.base.items() if not torch.equal(_bytes(x), _bytes(self.snapshot[n]))]
        for name in wrong:
            carrier = _carrier(self.base[name].dtype)
            self.base[name].view(carrier).copy_(self.snapshot[name].view(carrier))
        return wrong


def build(shape: Shape, probe_name: str, precision: Precision, seed: int, device: str = "cpu") -> KernelInputs:
    """Inputs of one case; the same for the same arguments. A quantised cache always has scales."""
    probe = PROBES[probe_name]
    digest = hashlib.sha256(f"{seed}:{shape.batch_spec}:{probe_name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    dtype, kv_dtype = TORCH_DTYPES[precision.dtype], TORCH_DTYPES[precision.kv_dtype]
    heads = shape.group * shape.kv_heads
    scale = (ODD_SCALE if shape.odd_scale else 1.0) / math.sqrt(shape.head_dim)
    contents = tuple(probe.make(shape, s, rng, scale) for s in range(len(shape.seqs)))
    k_scale, v_scale = _scales(shape, precision, contents)
    if probe.integers and v_scale is not None:
        contents = tuple(replace(c, value=c.value * per_head(v_scale)) for c in contents)
    stored_k = [quantize(c.key, kv_dtype, k_scale) for c in contents]
    stored_v = [quantize(c.value, kv_dtype, v_scale) for c in contents]
    table, owned = _block_table(shape, rng, digest[8])
    num_blocks = int(owned.shape[0])
    dim_v = shape.head_dim_v or shape.head_dim
    pool_k, key_cache = _pool(shape, num_blocks, shape.head_dim, kv_dtype, probe.overlay, rng, device)
    pool_v, value_cache = _pool(shape, num_blocks, dim_v, kv_dtype, probe.overlay, rng, device)
    if shape.layout == "interleaved" and dim_v == shape.head_dim:
        raw = _carrier(kv_dtype)  # K and V of a block side by side
        pool_k = pool_v = torch.stack([pool_k.view(raw), pool_v.view(raw)], 1).view(kv_dtype)
        key_cache, value_cache = pool_k[:, 0], pool_k[:, 1]
    for s, (_, length) in enumerate(shape.seqs):
        for cache, stored in ((key_cache, stored_k[s]), (value_cache, stored_v[s])):
            _write(cache, stored.to(device), table[s], length, shape.block_size)
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
    tensors = {name: x.to(device) for name, x in optional.items() if x is not None}
    tensors["block_table"] = table.to(device)
    tensors["seq_lens"] = torch.tensor([s for _, s in shape.seqs], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *(q for q, _ in shape.seqs)]).cumsum(0)
    tensors["query_start_loc"] = starts.to(torch.int32).to(device)
    batch = PagedBatch(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
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
        keys=tuple(dequantize(k, k_scale) if k_scale is not None else k for k in stored_k),
        values=tuple(dequantize(v, v_scale) if v_scale is not None else v for v in stored_v),
        base={"query": query_base, "key_cache": pool_k, "value_cache": pool_v, **tensors},
    )


def _scales(shape: Shape, precision: Precision, contents: tuple[Content, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Dequantisation factors of K and of V: never 1, never powers of two, never alike; they fit the largest number."""
    kind = shape.scales
    if kind == "none" and not precision.quantized:
        return None, None
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


def _block_table(shape: Shape, rng: torch.Generator, choice: int) -> tuple[Tensor, Tensor]:
    """Block table int32 [S, columns] and, per block, which sequence owns it (−1: nobody)."""
    used = [-(-length // shape.block_size) for _, length in shape.seqs]
    num_blocks = max(sum(used) + SPARE_BLOCKS, shape.min_blocks)
    ids = 1 + torch.randperm(num_blocks - 2, generator=rng)  # neither the first nor the last is ever owned
    if shape.min_blocks:  # ids just below and above the border
        ids = num_blocks - 2 - torch.arange(num_blocks - 2)
        ids[: sum(used)] = ids[: sum(used)][torch.randperm(sum(used), generator=rng)]
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


def _pool(
    shape: Shape, num_blocks: int, dim: int, dtype: torch.dtype, overlay: Overlay, rng: torch.Generator, device: str
) -> tuple[Tensor, Tensor]:
    """(whole memory, the cache [NB, BS, Hkv, dim] in it), filled with what must not be read."""
    size = (num_blocks, shape.block_size, shape.kv_heads, dim)
    if shape.layout == "padded":  # heads before tokens, and rows wider than a head
        size = (num_blocks, shape.kv_heads, shape.block_size, dim + 8)
    whole = _filled(size, dtype, overlay, rng).to(device)
    return whole, whole.transpose(1, 2)[..., :dim] if shape.layout == "padded" else whole


def _filled(size: tuple[int, ...], dtype: torch.dtype, overlay: Overlay, rng: torch.Generator) -> Tensor:
    if overlay == "plausible":
        return quantize(torch.randn(size, generator=rng), dtype)
    number = math.nan if overlay == "nan" and dtype != torch.int8 else 1e4
    return quantize(torch.tensor(number), dtype).view(_carrier(dtype)).expand(size).clone().view(dtype)


def _write(cache: Tensor, stored: Tensor, blocks: Tensor, length: int, block_size: int) -> None:
    raw, new = cache.view(_carrier(cache.dtype)), stored.view(_carrier(cache.dtype))
    for column in range(-(-length // block_size)):
        part = new[column * block_size : (column + 1) * block_size]
        raw[int(blocks[column]), : len(part)] = part


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width in which copying and filling work everywhere: fp8 lacks most operators."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
