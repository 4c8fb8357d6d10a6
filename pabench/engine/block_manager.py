"""Which block belongs to whom: allocation, growth, copy-on-write forks. Holds ids only, no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than asked for; nothing was changed. The text names both numbers."""


@dataclass
class _Owned:
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0


class BlockManager:
    """FIFO pool of ``num_blocks`` blocks of ``block_size`` tokens, with reference counts.

    Every operation either succeeds or changes nothing. Freed blocks go to the tail of the free list, in table order.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks
        self._owned: dict[int, _Owned] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_tokens(self, seq_id: int) -> int:
        return self._owned[seq_id].num_tokens

    def sequences(self) -> list[int]:
        """Ids of all allocated sequences, oldest first."""
        return list(self._owned)

    def table(self, seq_id: int) -> list[int]:
        """Physical block ids of a sequence in logical order (a copy)."""
        return list(self._owned[seq_id].blocks)

    def slot(self, seq_id: int, position: int) -> int:
        """Physical slot of a token: ``block_id * block_size + offset``."""
        return self._owned[seq_id].blocks[position // self.block_size] * self.block_size + position % self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def growth(self, seq_id: int, num_tokens: int) -> int:
        """Free blocks that ``append`` would take: for new tokens, and one to unshare a partly filled last block."""
        owned = self._owned[seq_id]
        return self.blocks_for(owned.num_tokens + num_tokens) - len(owned.blocks) + self._unshares(owned, num_tokens)

    def _unshares(self, owned: _Owned, num_tokens: int) -> bool:
        partial = owned.num_tokens % self.block_size != 0
        return partial and num_tokens > 0 and self._refs[owned.blocks[-1]] > 1

    def allocate(self, seq_id: int, num_tokens: int = 0) -> None:
        """Register a new sequence and give it blocks for ``num_tokens``. Raises ``OutOfBlocksError``."""
        if seq_id in self._owned:
            raise ValueError(f"sequence {seq_id} is already allocated")
        blocks = self._take(self.blocks_for(num_tokens))
        self._owned[seq_id] = _Owned(blocks, num_tokens)

    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Grow a sequence. Returns the (source, destination) blocks to copy first: a shared last block is not written.

        Raises ``OutOfBlocksError`` and changes nothing if the pool cannot hold it.
        """
        owned = self._owned[seq_id]
        unshare = self._unshares(owned, num_tokens)
        new = self._take(self.growth(seq_id, num_tokens))
        copies = []
        if unshare:
            source, target = owned.blocks[-1], new.pop(0)
            self._refs[source] -= 1
            owned.blocks[-1] = target
            copies.append((source, target))
        owned.blocks += new
        owned.num_tokens += num_tokens
        return copies

    def fork(self, parent: int, child: int) -> None:
        """Let ``child`` share all blocks of ``parent``; whoever writes into a shared block first gets a copy."""
        if child in self._owned:
            raise ValueError(f"sequence {child} is already allocated")
        source = self._owned[parent]
        for block in source.blocks:
            self._refs[block] += 1
        self._owned[child] = _Owned(list(source.blocks), source.num_tokens)

    def free(self, seq_id: int) -> None:
        """Give a sequence's blocks back. Raises ``KeyError`` for a sequence that is not allocated."""
        for block in self._owned.pop(seq_id).blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} blocks of {self.block_size} tokens needed, {len(self._free)} of {self.num_blocks} are free"
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks
