"""Was the kernel given what it should have been? Lengths, block table and the contents of the pool, held against what
the model made and what the block manager says. A kernel is not blamed for what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def wrong_model_inputs(
    input_ids: Sequence[int], position_ids: Sequence[int], tokens: Sequence[int], start: int
) -> list[WrongInput]:
    """What the model was told of a sequence's new tokens, against the tokens themselves and where they stand."""
    found = []
    if bad := [i for i, (a, b) in enumerate(zip(input_ids, tokens, strict=True)) if a != b]:
        i = bad[0]
        message = f"the model was given token {input_ids[i]} at position {start + i}, where the text has {tokens[i]}"
        found.append(WrongInput("input_mismatch", message, tokens=tuple(start + i for i in bad)))
    if bad := [i for i, p in enumerate(position_ids) if p != start + i]:
        i = bad[0]
        message = f"the model was told position {position_ids[i]} for the token at {start + i}"
        found.append(WrongInput("stale_metadata", message, tokens=tuple(start + i for i in bad)))
    return found


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


def wrong_format(
    batch: PagedBatch, dtype: torch.dtype, k_scale: Tensor | None, v_scale: Tensor | None
) -> list[WrongInput]:
    """Whether the cache has the dtype that was asked for and is read with the scales it is meant to be written with."""
    found = []
    for name, cache in (("K", batch.key_cache), ("V", batch.value_cache)):
        if cache.dtype != dtype:
            message = f"{name} is kept in {_name(cache.dtype)}; {_name(dtype)} was asked for"
            found.append(WrongInput("dtype_ignored", message))
    for name, given, right in (("k_scale", batch.k_scale, k_scale), ("v_scale", batch.v_scale, v_scale)):
        if not found and not _same_scale(given, right):
            message = f"the kernel was given {name} {_shown(given)}; the cache is written with {_shown(right)}"
            found.append(WrongInput("kv_scale", message))
    return found


def _same_scale(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a, b)


def _shown(scale: Tensor | None) -> str:
    if scale is None:
        return "none"
    return (
        f"{float(scale):.4g}"
        if scale.ndim == 0
        else f"one of {list(scale.shape)} beginning {float(scale.flatten()[0]):.4g}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        expected = _as_bits(quantize(made, cache.dtype, scale))
        lying = _as_bits(cache)[blocks, position % size]
        bad = torch.nonzero((lying != expected).flatten(1).any(1)).flatten()
        if not bad.numel():
            continue
        tokens = tuple((bad + first).tolist())
        slot = int(blocks[bad[0]]) * size + tokens[0] % size
        what = _what_lies_there(lying[bad[0]], expected, int(bad[0]), first)
        if scale is not None and torch.equal(lying, _as_bits(quantize(made, cache.dtype))):
            what = "it was written as if its scale were 1"
        elif (
            name == "V"
            and key.shape == value.shape
            and torch.equal(lying, _as_bits(quantize(key, cache.dtype, batch.k_scale)))
        ):
            what = "K lies there"
        message = (
            f"{name} of {len(bad)} of {len(key)} tokens is not in the cache as the model made it, first at token "
            f"{tokens[0]} (block {tokens[0] // size}, slot {slot}): {what}"
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
    if torch.equal(lying, lying.flatten()[:1].expand_as(lying)) and bool(lying.any()):
        return "the slot was never written"  # the pool's fill, one value all over
    if not bool(lying.any()):
        return "zeros lie there"
    wrong = torch.nonzero((lying != expected[at]).any(-1)).flatten()
    return f"other numbers lie there, in {len(wrong)} of {len(lying)} KV heads"


def _as_bits(x: Tensor) -> Tensor:
    """Whole numbers of the same width: NaN equals itself, and every cache dtype can be indexed."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(widths[x.dtype.itemsize])
