"""One forward pass over a packed, ragged batch: what each sequence contributes, and the tensors kernels are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pabench.engine.block_manager import BlockManager


@dataclass(frozen=True)
class Work:
    """The next tokens of one sequence, starting at position ``start``; ``logits_at`` are offsets within ``tokens``."""

    seq_id: int
    tokens: tuple[int, ...]
    start: int
    logits_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of this step only, built new for each: T tokens, S sequences. Host lists beside the tensors."""

    work: tuple[Work, ...]
    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    slot_mapping: Tensor  # int64 [T]
    block_table: Tensor  # int32 [S, max_blocks]; -1 where unused
    seq_lens: Tensor  # int32 [S]
    query_start_loc: Tensor  # int32 [S + 1]
    max_query_len: int
    max_seq_len: int
    logits_index: Tensor  # int64 [n]: rows of the packed batch whose logits are wanted, in order of ``work``


def build_step(work: Sequence[Work], blocks: BlockManager, device: str | torch.device = "cpu") -> StepMetadata:
    """Lay out the packed batch. Blocks for all tokens of ``work`` must be allocated already."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    starts = [0]
    for item in work:
        wanted += [len(ids) + offset for offset in item.logits_at]
        ids += item.tokens
        span = range(item.start, item.start + len(item.tokens))
        positions += span
        slots += [blocks.slot(item.seq_id, p) for p in span]
        starts.append(len(ids))
    tables = [blocks.table(item.seq_id) for item in work]
    width = max(len(table) for table in tables)
    seq_lens = [item.start + len(item.tokens) for item in work]

    def tensor(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepMetadata(
        work=tuple(work),
        input_ids=tensor([ids], torch.int64),
        position_ids=tensor([positions], torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        block_table=tensor([table + [-1] * (width - len(table)) for table in tables], torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        query_start_loc=tensor(starts, torch.int32),
        max_query_len=max(len(item.tokens) for item in work),
        max_seq_len=max(seq_lens),
        logits_index=tensor(wanted, torch.int64),
    )
