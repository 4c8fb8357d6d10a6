"""What does a kernel really read? The call at fault is made again over a cache whose contents name their place.

The pool is the live one (some faults depend on where it lies): its blocks are overwritten, and put back afterwards.

Three questions, each answered by V that holds a number one-hot over its channels. With q = 0 every visible slot weighs
the same, so the output counts the slots read of each block and of each offset; with the number of the KV head in V it
says whose V was read; with scores that spell block numbers bit by bit, a key read from elsewhere gives its weight to
the wrong block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pabench.diagnose.structured import Content, shares, stored_raw, used_blocks
from pabench_kernels.contract import PagedBatch

HIGH_SCORE = 4.0  # a marked key weighs e⁴ times an unmarked one
COUNT_SLACK = 0.25  # slots
SHARE_SLACK = 0.02  # of the weight; one marked block of many moves it by more in one of the bits
ROUNDOFFS = 4.0  # × u × the number itself: the output is rounded

Call = Callable[[PagedBatch], Tensor]


@dataclass(frozen=True)
class Misread:
    """What one KV head's query heads read wrongly of one sequence."""

    seq: int
    q_heads: tuple[int, ...]
    kv_head: int
    what: str  # "slots", "heads" or "keys"
    blocks: tuple[int, ...] = ()  # logical, ascending
    offsets: tuple[int, ...] = ()  # in the first of them, or in every block where ``blocks`` is empty
    missing: int = 0  # slots of the first bad block that are not read
    extra: int = 0  # … that are read too often
    foreign: int = 0  # slots read that are not the sequence's at all
    read_from: tuple[int, ...] = ()  # KV heads read in place of ``kv_head``


def misreads(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    """Make ``batch``'s call again with structured contents and say what of ``seq`` is read wrongly.

    Empty where all is read as it should be. What the kernel raises passes through; the pool is put back in any case.
    """
    if int(batch.seq_lens[seq]) == 0:
        return []
    with _pool_kept(batch):
        return _heads(batch, call, seq) or _slots(batch, call, seq) or _keys(batch, call, seq)


@contextmanager
def _pool_kept(batch: PagedBatch) -> Iterator[None]:
    used = used_blocks(batch)
    pools = [stored_raw(batch.key_cache), stored_raw(batch.value_cache)]
    before = [pool[used].clone() for pool in pools]
    try:
        yield
    finally:
        for pool, old in zip(pools, before, strict=True):
            pool[used] = old


def _positions(batch: PagedBatch, seq: int) -> Tensor:
    return torch.arange(int(batch.seq_lens[seq]), device=batch.query.device)


def _quiet(batch: PagedBatch) -> PagedBatch:
    """q = 0 and no distance term: all visible slots weigh the same."""
    slopes = None if batch.alibi_slopes is None else torch.zeros_like(batch.alibi_slopes)
    return replace(batch, query=torch.zeros_like(batch.query), alibi_slopes=slopes)


def _heads(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    """V holds the number of its KV head; heads beyond its channels are not told apart."""
    heads = batch.num_kv_heads
    if heads == 1 or heads > batch.head_dim_v:
        return []
    code = torch.arange(heads, device=batch.query.device).expand(int(batch.seq_lens[seq]), -1)
    found, expected = shares(_quiet(batch), call, seq, Content(code, None, heads))
    bad = (found - expected).abs() > SHARE_SLACK  # NaN says nothing of what was read
    if not bool(found.nan_to_num().any()):
        return []  # nor does an output of zeros
    result = []
    for kv_head, mine in _by_kv_head(batch):
        wrong = bad[:, mine].any(0).any(-1)  # [heads of the group]
        if bool(wrong.any()):
            share = found[:, mine][:, wrong].nan_to_num().amax(0).amax(0)
            read = tuple(h for h in torch.nonzero(share > SHARE_SLACK).flatten().tolist() if h != kv_head)
            if read:
                q_heads = tuple(mine[i] for i in torch.nonzero(wrong).flatten().tolist())
                result.append(Misread(seq, q_heads, kv_head, "heads", read_from=read))
    return result


def _slots(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    """Slots read of each block; where those are right, of each offset over all blocks; then slots of nobody."""
    position, size = _positions(batch, seq), batch.block_size
    by_block = _counts(batch, call, seq, position // size)
    result = []
    for kv_head, mine in _by_kv_head(batch):
        bad, off = (x[:, mine] for x in by_block)
        if not bool(bad.any()):
            continue
        blocks = tuple(torch.nonzero(bad.any(0).any(0)).flatten().tolist())
        inside = torch.where(position // size == blocks[0], position % size, -1)
        bad_offsets = _counts(batch, call, seq, inside)[0][:, mine].any(0).any(0)
        first = off[..., blocks[0]].nan_to_num()
        result.append(
            Misread(
                seq,
                tuple(mine[i] for i in torch.nonzero(bad.any(0).any(-1)).flatten().tolist()),
                kv_head,
                "slots",
                blocks=blocks,
                offsets=tuple(torch.nonzero(bad_offsets).flatten().tolist()),
                missing=round(max(0.0, -float(first.min()))),
                extra=round(max(0.0, float(first.max()))),
            )
        )
    if result:
        return result
    bad, off = _counts(batch, call, seq, position % size)
    for kv_head, mine in _by_kv_head(batch):
        wrong = bad[:, mine].any(0)
        if bool(wrong.any()):
            q_heads = tuple(mine[i] for i in torch.nonzero(wrong.any(-1)).flatten().tolist())
            offsets = tuple(torch.nonzero(wrong.any(0)).flatten().tolist())
            result.append(Misread(seq, q_heads, kv_head, "slots", offsets=offsets))
    return result or _foreign(batch, call, seq)


def _foreign(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    """Weight that no slot of the sequence gets: other slots, which hold zeros, take part in the softmax."""
    # More than half as many again is no stray slot but another factor on V, as when fp8 is read as another kind.
    nothing = torch.zeros(int(batch.seq_lens[seq]), batch.num_kv_heads, dtype=torch.int64, device=batch.query.device)
    found, expected = shares(_quiet(batch), call, seq, Content(nothing, None, 1))
    more = (_weight(batch, seq)[..., None] * (expected / found - 1)).nan_to_num(0.0, 0.0, 0.0)
    unit = torch.finfo(batch.query.dtype).eps / 2
    bad = (more < 0.5 * _weight(batch, seq)[..., None]) & (more > COUNT_SLACK + unit * _weight(batch, seq)[..., None])
    result = []
    for kv_head, mine in _by_kv_head(batch):
        wrong = bad[:, mine].any(0).flatten()
        if bool(wrong.any()):
            q_heads = tuple(mine[i] for i in torch.nonzero(wrong).flatten().tolist())
            result.append(Misread(seq, q_heads, kv_head, "slots", foreign=round(float(more[:, mine].max()))))
    return result


def _keys(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    """Shares of the weight that each block gets when the keys spell block numbers, one bit at a time."""
    block = _positions(batch, seq) // batch.block_size
    query = torch.zeros_like(batch.query)
    query[..., 0] = HIGH_SCORE / batch.scale
    k_scale = batch.k_scale
    if k_scale is not None and k_scale.ndim < 3:  # so that a stored 1 scores HIGH_SCORE in every head
        each = k_scale.expand(batch.num_kv_heads).repeat_interleave(batch.group_size)
        query[..., 0] = (query[..., 0].float() / each).to(query.dtype)
    pointed = replace(_quiet(batch), query=query)
    bad: Tensor | None = None
    for bit in range(max(1, int(block[-1]).bit_length())):
        content = Content(block[:, None].expand(-1, batch.num_kv_heads), (block >> bit) & 1, int(block[-1]) + 1)
        found, expected = shares(pointed, call, seq, content)
        now = ((found - expected).abs() > SHARE_SLACK) & bool(found.nan_to_num().any())
        bad = now if bad is None else bad | now
    assert bad is not None
    result = []
    for kv_head, mine in _by_kv_head(batch):
        wrong = bad[:, mine].any(0)
        if bool(wrong.any()):
            q_heads = tuple(mine[i] for i in torch.nonzero(wrong.any(-1)).flatten().tolist())
            blocks = tuple(torch.nonzero(wrong.any(0)).flatten().tolist())
            result.append(Misread(seq, q_heads, kv_head, "keys", blocks=blocks))
    return result


def _counts(batch: PagedBatch, call: Call, seq: int, code: Tensor) -> tuple[Tensor, Tensor]:
    """(bad, off) [T, Hq, codes]: where the slots read of each code are not those expected, and by how many.

    A slot too few or too many changes the softmax denominator and so every share, while the shares still add up: the
    denominator is then taken from the codes that most agree on it. Where they do not add up, values are wrong or slots
    of others take part, and the denominator is the right one. One factor on all of them is no matter of slots.
    """
    content = Content(code[:, None].expand(-1, batch.num_kv_heads), None, max(1, int(code.max()) + 1))
    found, expected = shares(_quiet(batch), call, seq, content)
    weight = _weight(batch, seq)[..., None]
    wanted = expected * weight
    estimate = torch.where((found > 0) & (wanted > 0.5), wanted / found, torch.nan)
    own = estimate.nanmedian(-1, keepdim=True).values
    whole = (found.sum(-1, keepdim=True) - expected.sum(-1, keepdim=True)).abs() <= SHARE_SLACK
    off = found * torch.where(whole & own.isfinite(), own, weight) - wanted
    factor = torch.where(wanted > 0.5, found / expected.clamp_min(1e-12), torch.nan)
    spread = factor.nan_to_num(-torch.inf).amax(-1) - factor.nan_to_num(torch.inf).amin(-1)
    alike = ~whole & (spread < SHARE_SLACK)[..., None] & (content.codes > 1)
    unit = torch.finfo(batch.query.dtype).eps / 2
    something = bool(found.nan_to_num().any())
    return (off.abs() > COUNT_SLACK + ROUNDOFFS * unit * wanted) & ~alike & something, off


def _weight(batch: PagedBatch, seq: int) -> Tensor:
    """Softmax denominator of each row when all scores are 0: visible slots + e^sink. fp64 [T, Hq]."""
    starts, length = batch.query_start_loc.tolist(), int(batch.seq_lens[seq])
    i = torch.arange(length - (starts[seq + 1] - starts[seq]), length, device=batch.query.device)
    first = torch.zeros_like(i) if batch.sliding_window is None else (i - batch.sliding_window + 1).clamp(min=0)
    last = i if batch.causal else torch.full_like(i, length - 1)
    seen = (last - first + 1).double()[:, None].expand(-1, batch.num_q_heads)
    return seen if batch.sinks is None else seen + batch.sinks.double().exp()


def _by_kv_head(batch: PagedBatch) -> Iterator[tuple[int, list[int]]]:
    """(KV head, the query heads that should read it)."""
    for kv_head in range(batch.num_kv_heads):
        yield kv_head, list(range(kv_head * batch.group_size, (kv_head + 1) * batch.group_size))
