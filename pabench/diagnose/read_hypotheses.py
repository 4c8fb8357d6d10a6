"""What could be read from the wrong place: other slots, other blocks, other heads, another layout, a truncated head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pabench.diagnose.hypotheses import Change, Hypothesis
from pabench.diagnose.setting import Setting

VECTORS = (8, 16, 32, 64, 128)  # channels a kernel may take at a time


def read_hypotheses() -> Iterator[Hypothesis]:
    yield from _slots()
    yield from _blocks()
    yield from _behind_the_end()
    yield from _channels()


def _slots() -> Iterator[Hypothesis]:
    """Own tokens in the wrong order."""

    def order(what: str, tokens: Change) -> Hypothesis:
        return Hypothesis("wrong_block", what, tokens)

    def offset_zero(s: Setting) -> Setting | None:
        return s.reading(s.j // s.block_size * s.block_size) if s.block_size > 1 else None

    def columns(order: Callable[[Tensor], Tensor]) -> Change:
        """Blocks by another column of the table, with whatever lies in them."""

        def change(s: Setting) -> Setting | None:
            last = (s.length - 1) // s.block_size
            column = s.j // s.block_size
            moved = order(column)
            moved = moved.where((moved >= 0) & (moved <= last), column)
            if last == 0 or torch.equal(moved, column):
                return None
            if s.reread is None or s.table is None:
                return None
            key, value = s.reread(s.table[moved], s.j % s.block_size, False)
            return replace(s, key=key, value=value)

        return change

    yield order("every slot of a block were read from its first", offset_zero)
    yield order("the first two blocks changed places", columns(lambda c: torch.where(c < 2, 1 - c, c)))
    yield order("the block table were read one column late", columns(lambda c: c - 1))
    yield order("the block table were read one column early", columns(lambda c: c + 1))
    yield order("the first block were read for all", columns(torch.zeros_like))
    yield order("the second block were read in place of the first", columns(lambda c: c.clamp(min=1)))


def _blocks() -> Iterator[Hypothesis]:
    """Blocks of the pool that the table does not name."""

    def ids(s: Setting) -> Tensor | None:
        if s.reread is None or s.table is None:
            return None
        found = s.table[s.j // s.block_size]
        return None if bool((found < 0).all()) else found

    def elsewhere(s: Setting, blocks: Tensor | None, flat: bool = False) -> Setting | None:
        if s.reread is None or blocks is None:
            return None
        key, value = s.reread(blocks, s.j % s.block_size, flat)
        return replace(s, key=key, value=value)

    def wrapped(bits: int) -> Change:
        def change(s: Setting) -> Setting | None:
            found = ids(s)
            if found is None or int(found.max()) < 1 << bits:
                return None
            return elsewhere(s, torch.where(found >= 0, found & ((1 << bits) - 1), found))

        return change

    def contiguous(s: Setting) -> Setting | None:
        return elsewhere(s, ids(s), flat=True)

    def logical(s: Setting) -> Setting | None:
        return elsewhere(s, s.j // s.block_size)

    def of_sequence(n: int) -> Change:
        def change(s: Setting) -> Setting | None:
            if n >= len(s.other_tables):
                return None
            other = s.other_tables[n][s.j // s.block_size]
            mine = ids(s)
            if mine is None or bool((other < 0).all()) or torch.equal(other[other >= 0], mine[other >= 0]):
                return None
            return elsewhere(s, torch.where(other >= 0, other, mine))

        return change

    for bits in (15, 16):
        yield Hypothesis("block_alias", f"block ids were taken modulo 2^{bits}", wrapped(bits))
    yield Hypothesis("layout_stride", "the cache were contiguous, whatever its strides", contiguous)
    yield Hypothesis("wrong_block", "logical block numbers were taken for physical ones", logical)
    for n in range(8):
        yield Hypothesis("wrong_block", "another sequence's block table were used", of_sequence(n))


def _behind_the_end() -> Iterator[Hypothesis]:
    def more(count: int | None) -> Change:
        """``count`` slots behind the end, or all to the end of the last block."""

        def change(s: Setting) -> Setting | None:
            if s.reread is None or s.table is None or not bool((s.positions >= s.length - 1).any()):
                return None
            n = -s.length % s.block_size if count is None else count
            if n == 0 or (s.length + n - 1) // s.block_size >= len(s.table):
                return None
            j = torch.arange(s.length + n, device=s.query.device)
            blocks = s.table[j // s.block_size]
            if bool((blocks[s.length :] < 0).any()):
                return None
            key, value = s.reread(blocks[s.length :], j[s.length :] % s.block_size, False)
            last = s.positions[:, None] >= s.length - 1

            def see(mask: Tensor) -> Tensor:
                return mask | (last & (j >= s.length))

            return replace(s, key=_cat(s.key, key), value=_cat(s.value, value), on_mask=see)

        return change

    yield Hypothesis("stale_read", "one slot behind the end of the sequence were read", more(1))
    yield Hypothesis("stale_read", "the last block were read to its end", more(None))


def _cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.float(), b.float()])


def _channels() -> Iterator[Hypothesis]:
    for vector in VECTORS:

        def shorter(s: Setting, vector: int = vector) -> Setting | None:
            dim = s.query.shape[-1]
            kept = dim // vector * vector
            if kept in (0, dim):
                return None
            return replace(s, query=s.query.clone().index_fill_(2, torch.arange(kept, dim, device=s.query.device), 0.0))

        yield Hypothesis("head_dim_tail", f"q·k left out the channels beyond the last whole {vector}", shorter)
    for kept in (64, 128):

        def capped(s: Setting, kept: int = kept) -> Setting | None:
            dim = s.query.shape[-1]
            if kept >= dim:
                return None
            return replace(s, query=s.query.clone().index_fill_(2, torch.arange(kept, dim, device=s.query.device), 0.0))

        yield Hypothesis("head_dim_tail", f"q·k took the first {kept} channels only", capped)
