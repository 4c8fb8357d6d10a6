"""One wrong attention call of a model, held against every hypothesis of ``pabench.diagnose``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pabench.checks.shadow import SeenCall
from pabench.diagnose.explain import MATCH, Explanation, explain
from pabench.diagnose.hypotheses import OTHER_FP8
from pabench.diagnose.observed import Match, Observed
from pabench.diagnose.setting import Reread, Setting, attend
from pabench_kernels.cache_write import quantize
from pabench_kernels.contract import PagedBatch

MAX_TOKENS = 8  # rows held against a hypothesis; the worst, and a spread of wrong and right ones


def explain_call(seen: SeenCall) -> Explanation | None:
    """What explains the wrong rows of ``seen``; None where they are not finite and no misread fp8 makes them so."""
    ratio = seen.ratio(seen.out)
    wrong = ratio > 1
    if not bool(wrong.any()):
        return None
    if not bool(seen.out.isfinite().all()):
        return _other_fp8(seen)
    picked = _rows(ratio)
    return explain([Observed(setting_of(seen, picked), seen.out[picked].double(), seen.allowed[picked], wrong[picked])])


def _other_fp8(seen: SeenCall) -> Explanation | None:
    """Bits of one fp8 kind are NaN or Inf in the other: whether the very same rows would be."""
    other = OTHER_FP8.get(seen.batch.key_cache.dtype)
    if other is None:
        return None
    setting = setting_of(seen, torch.arange(len(seen.out)))
    out, size = attend(replace(setting, key=setting.key.view(other), value=setting.value.view(other)))
    finite, would_be = seen.out.isfinite().all(-1), out.isfinite().all(-1)
    if bool(would_be.all()) or bool((finite & ~would_be).any()):
        return None
    off = (seen.out.double() - out).norm(dim=-1) / (size * seen.allowed)
    if bool((off[finite] > MATCH).any()):
        return None
    what = f"the cache were read as {str(other).removeprefix('torch.')}"
    return Explanation(
        "dtype_ignored", 0.9, (Match("dtype_ignored", what, float(off[finite].max()) if finite.any() else 0.0),)
    )


def _rows(ratio: Tensor) -> Tensor:
    bad = torch.nonzero((ratio > 1).any(1)).flatten().tolist()
    wanted = [int(ratio.amax(1).argmax()), bad[0], bad[-1], 0, len(ratio) - 1, *bad[:: max(1, len(bad) // MAX_TOKENS)]]
    return torch.tensor(list(dict.fromkeys(wanted))[:MAX_TOKENS]).sort().values


def setting_of(seen: SeenCall, picked: Tensor) -> Setting:
    """Rows ``picked`` of the call; K and V as they should be stored."""
    batch, device = seen.batch, seen.batch.query.device
    begin = int(batch.query_start_loc[seen.seq_index])
    tables = batch.block_table.long()

    def factors(scale: Tensor | None) -> Tensor:
        one = torch.ones((), dtype=torch.float64, device=device) if scale is None else scale.double()
        return one.expand(batch.num_kv_heads)

    return Setting(
        query=batch.query[begin + picked.to(device)].double(),
        key=quantize(seen.key, batch.key_cache.dtype, batch.k_scale),
        value=quantize(seen.value, batch.value_cache.dtype, batch.v_scale),
        k_scale=factors(batch.k_scale),
        v_scale=factors(batch.v_scale),
        positions=(seen.work.start + picked).to(device),
        kv_head=torch.arange(batch.num_q_heads, device=device) // batch.group_size,
        chunk_begin=seen.work.start,
        scale=batch.scale,
        causal=batch.causal,
        window=batch.sliding_window,
        slopes=batch.alibi_slopes,
        cap=batch.logits_soft_cap,
        sinks=batch.sinks,
        block_size=batch.block_size,
        has_scales=batch.k_scale is not None or batch.v_scale is not None,
        dtype=batch.query.dtype,
        table=tables[seen.seq_index],
        other_tables=tuple(_owned(batch, n) for n in range(batch.num_seqs)),
        reread=_reread(batch),
    )


def _owned(batch: PagedBatch, seq: int) -> Tensor:
    """A sequence's row of the block table, −1 behind its end."""
    row = batch.block_table[seq].long().clone()
    row[-(-int(batch.seq_lens[seq]) // batch.block_size) :] = -1
    return row


def _reread(batch: PagedBatch) -> Reread:
    """Stored K and V of any physical slots; ``contiguous`` takes the cache's memory for a contiguous one."""

    def read(blocks: Tensor, offsets: Tensor, contiguous: bool) -> tuple[Tensor, Tensor]:
        found = []
        for cache in (batch.key_cache, batch.value_cache):
            if contiguous:
                size = cache.untyped_storage().nbytes() // cache.itemsize
                cache = cache.as_strided((size,), (1,), 0)[: cache.numel()].view(cache.shape)
            raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            found.append(raw[blocks.clamp(0, len(raw) - 1), offsets].view(cache.dtype))
        return found[0], found[1]

    return read
