"""Blocks, bytes and budgets of one device: the arithmetic under every plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pabench.planner.shape import DTYPE_BYTES, SCALE_BYTES, LayerCache

SCALE_STORAGE = ("none", "block", "token")


@dataclass(frozen=True)
class Paging:
    """How a cache is cut into blocks. ``free_behind_window``: blocks behind a layer's window are given back, so that
    such layers form pools of their own; else every layer keeps every token. ``step_tokens``: new tokens of a sequence
    in one step."""

    block_size: int = 32
    kv_dtype: str = "bf16"
    scales: str = "none"  # per block or token and head, in fp32; scales per tensor are a few bytes
    free_behind_window: bool = False
    step_tokens: int = 2048

    def block_bytes(self, layers: Iterable[LayerCache], ranks: int = 1) -> int:
        """Bytes of one block in all of ``layers``: b · s · Σ e_l, and scales where they are stored."""
        layers = list(layers)
        per_token = DTYPE_BYTES[self.kv_dtype] * sum(layer.elements(ranks) for layer in layers)
        return self.block_size * per_token + self.scale_bytes(layers, ranks)

    def scale_bytes(self, layers: Iterable[LayerCache], ranks: int = 1) -> int:
        """Bytes of the scales of one block in all of ``layers``."""
        times = {"none": 0, "block": 1, "token": self.block_size}[self.scales]
        return times * SCALE_BYTES * sum(layer.scales(ranks) for layer in layers)

    def blocks_for(self, tokens: int) -> int:
        """Blocks rounded up: n tokens must fit."""
        return -(-tokens // self.block_size)

    def window_blocks(self, window: int) -> int:
        """The most blocks a sequence needs behind a window: w + c − 1 consecutive tokens, wherever they begin."""
        return self.blocks_for(window + self.step_tokens - 2) + 1


@dataclass(frozen=True)
class Group:
    """Layers that share their blocks: those without a window, or with one. ``limit``: blocks a sequence can need."""

    window: int | None
    num_layers: int
    block_bytes: int
    limit: int | None

    def blocks(self, num_blocks: int, sequences: int, reserved: int) -> int:
        """Blocks of this group's pool where the unwindowed one has ``num_blocks``."""
        return num_blocks if self.limit is None else min(num_blocks, sequences * self.limit + reserved)


def groups(paging: Paging, layers: Sequence[LayerCache], ranks: int = 1) -> tuple[Group, ...]:
    """The block groups of ``layers``, the unwindowed one first. Layers without a paged cache are in none."""
    windows = {layer.window for layer in layers if layer.kv_heads}
    found = []
    for window in sorted(windows, key=lambda w: (w is not None, w)):
        own = [layer for layer in layers if layer.kv_heads and layer.window == window]
        limit = paging.window_blocks(window) if paging.free_behind_window and window is not None else None
        found.append(Group(window, len(own), paging.block_bytes(own, ranks), limit))
    return tuple(found)


def bytes_needed(parts: Iterable[Group], num_blocks: int, sequences: int, reserved: int) -> int:
    """Bytes of all pools where the unwindowed one has ``num_blocks``."""
    return sum(g.block_bytes * g.blocks(num_blocks, sequences, reserved) for g in parts)


def blocks_that_fit(budget: int, parts: Sequence[Group], sequences: int = 1, reserved: int = 0) -> int | None:
    """The largest number of blocks whose pools fit into ``budget`` bytes; None if they fit at any length.

    Without freeing it is ⌊budget / block bytes⌋. A freed window's pool stops growing at its limit, which makes the
    bytes a concave, piecewise linear function of the blocks: walk from one limit to the next.
    """
    slope, spent = sum(g.block_bytes for g in parts), 0
    for group in sorted((g for g in parts if g.limit is not None), key=lambda g: g.limit or 0):
        full = sequences * (group.limit or 0) + reserved
        if (fitting := max(0, budget - spent) // slope) < full:
            return fitting
        spent += full * group.block_bytes
        slope -= group.block_bytes
    return max(0, budget - spent) // slope if slope else None


def sequences_that_fit(budget: int, parts: Sequence[Group], blocks_each: int, reserved: int) -> int:
    """How many sequences of ``blocks_each`` blocks fit at once, if the pools are cut for them."""
    each = sum(g.block_bytes * (blocks_each if g.limit is None else min(blocks_each, g.limit)) for g in parts)
    return max(0, budget - reserved * sum(g.block_bytes for g in parts)) // each
