"""Was the kernel given what it should have been? Lengths, block table and the contents of the pool, held against what
the model made and what the block manager says. A kernel is not blamed for what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.diagnose.structured import stored_raw
from pabench_kernels.cache_write import quantize
from pabench_kernels.contract import PagedBatch


@dataclass(frozen=True)
class WrongInput:
    """One thing that was not as it should be, before the kernel saw it. ``tokens`` are positions in the sequence."""

    fault: str
    message: str
    tokens: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()  # logical
    slots: tuple[int, ...] = ()


def wrong_lengths(batch: PagedBatch, seq: int, num_tokens: int) -> list[WrongInput]:
    """``num_tokens`` is what the sequence holds, this step's tokens included."""
    given = int(batch.seq_lens[seq])
    if given == num_tokens:
        return []
    message = f"the kernel was told that sequence {seq} has {given} tokens; it has {num_tokens}"
    return [WrongInput("stale_metadata", message)]


def wrong_table(batch: PagedBatch, seq: int, table: Sequence[int]) -> list[WrongInput]:
    """``table`` holds the physical ids that the block manager gave this sequence, in logical order."""
    given = batch.block_table[seq].tolist()
    bad = tuple(i for i, block in enumerate(table) if i >= len(given) or given[i] != block)
    if not bad:
        return []
    first = bad[0]
    what = given[first] if first < len(given) else "no column"
    message = (
        f"the block table given for sequence {seq} holds {what} for its block {first}; the block manager gave it "
        f"{table[first]} ({len(bad)} of {len(table)} blocks differ)"
    )
    return [WrongInput("stale_metadata", message, blocks=bad)]


def wrong_contents(
    batch: PagedBatch, seq: int, table: Sequence[int], key: Tensor, value: Tensor, first: int = 0
) -> list[WrongInput]:
    """``key`` [n, Hkv, D] and ``value`` [n, Hkv, Dv]: what the model made for the tokens from ``first`` on.

    Compared bit for bit with what lies in the slots that the block manager gave them.
    """
    size, device = batch.block_size, batch.query.device
    position = torch.arange(first, first + len(key), device=device)
    blocks = torch.tensor(list(table), device=device)[position // size]
    found = []
    for name, cache, made, scale in (
        ("K", batch.key_cache, key, batch.k_scale),
        ("V", batch.value_cache, value, batch.v_scale),
    ):
        expected = stored_raw(quantize(made, cache.dtype, scale) if scale is None or scale.ndim < 3 else made)
        lying = stored_raw(cache)[blocks, position % size]
        bad = torch.nonzero((lying != expected).flatten(1).any(1)).flatten()
        if not bad.numel():
            continue
        tokens = tuple((bad + first).tolist())
        slot = int(blocks[bad[0]]) * size + tokens[0] % size
        message = (
            f"{name} of {len(bad)} of {len(key)} tokens is not in the cache as the model made it, first at token "
            f"{tokens[0]} (block {tokens[0] // size}, slot {slot}): {_what_lies_there(lying[bad[0]], expected, int(bad[0]), first)}"
        )
        found.append(
            WrongInput(
                "slot_write",
                message,
                tokens=tokens,
                blocks=tuple(dict.fromkeys(t // size for t in tokens)),
                slots=tuple(int(blocks[t - first]) * size + t % size for t in tokens),
            )
        )
    return found


def _what_lies_there(lying: Tensor, expected: Tensor, at: int, first: int) -> str:
    """``lying`` [Hkv, D] raw, where row ``at`` of ``expected`` [n, Hkv, D] belongs; row 0 is token ``first``."""
    same = torch.nonzero((expected == lying).flatten(1).all(1)).flatten()
    if same.numel():
        return f"what belongs to token {int(same[0]) + first} lies there"
    never = lying == 0x7F if lying.dtype == torch.uint8 else lying.isnan()
    if bool(never.all()):
        return "the slot was never written"
    if not bool(lying.any()):
        return "zeros lie there"
    wrong = torch.nonzero((lying != expected[at]).any(-1)).flatten()
    return f"other numbers lie there, in {len(wrong)} of {len(lying)} KV heads"
