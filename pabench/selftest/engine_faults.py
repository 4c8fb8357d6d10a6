"""Faults of an engine around an honest kernel: cache writes, block tables, lengths, forks. Each changes one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pabench.engine.block_manager import BlockManager
from pabench.engine.engine import PagedEngine
from pabench.engine.step import StepMetadata, Work


@dataclass(frozen=True)
class EngineFault:
    """``make`` spoils one engine when it is made. ``quantized``: it shows with a quantised cache only."""

    name: str
    fault: str
    what: str
    make: Callable[[PagedEngine], None]
    quantized: bool = False
    also: frozenset[str] = frozenset()
    mandatory: bool = True

    @property
    def names(self) -> frozenset[str]:
        return self.also | {self.fault}

    @property
    def engine_type(self) -> type[PagedEngine]:
        """An engine with this fault in place of an honest one."""
        make = self.make

        class FaultyEngine(PagedEngine):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)  # type: ignore[arg-type]
                make(self)

        return FaultyEngine


Scales = tuple[Tensor | None, Tensor | None]
Write = Callable[[Callable[[int, Tensor, Tensor, Tensor], None], int, Tensor, Tensor, Tensor], None]


def _write(change: Write) -> Callable[[PagedEngine], None]:
    """``change(write, layer, key, value, slot_mapping)`` in place of the cache write."""

    def make(engine: PagedEngine) -> None:
        honest = engine.pool.write

        def faulty(layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
            change(honest, layer, key, value, slot_mapping)

        engine.pool.write = faulty  # type: ignore[method-assign]

    return make


def _metadata(change: Callable[[StepMetadata, StepMetadata | None], StepMetadata]) -> Callable[[PagedEngine], None]:
    """``change(this step's metadata, the honest metadata of the step before)``."""

    def make(engine: PagedEngine) -> None:
        honest, before = engine.metadata, [None]

        def faulty(work: Sequence[Work]) -> StepMetadata:
            step = honest(work)
            changed = change(step, before[0])
            before[0] = step  # type: ignore[call-overload]
            return changed

        engine.metadata = faulty  # type: ignore[method-assign]

    return make


def _same_decode(step: StepMetadata, before: StepMetadata | None) -> bool:
    """Whether both are decode steps of the same sequences."""
    return (
        before is not None
        and step.max_query_len == 1
        and [w.seq_id for w in step.work] == [w.seq_id for w in before.work]
    )


def _stale_lengths(step: StepMetadata, before: StepMetadata | None) -> StepMetadata:
    if not _same_decode(step, before):
        return step
    assert before is not None
    return replace(step, seq_lens=before.seq_lens, max_seq_len=before.max_seq_len)


def _stale_table(step: StepMetadata, before: StepMetadata | None) -> StepMetadata:
    """The table of the step before: a block taken in this step is not in it."""
    if not _same_decode(step, before):
        return step
    assert before is not None
    table = step.block_table.clone()
    width = before.block_table.shape[1]
    table[:, :width] = torch.where(before.block_table >= 0, before.block_table, 0)
    table[:, width:] = 0
    return replace(step, block_table=table)


def _positions_late(step: StepMetadata, before: StepMetadata | None) -> StepMetadata:
    """In decode the model is told the position of the token before."""
    if step.max_query_len > 1:
        return step
    return replace(step, position_ids=(step.position_ids - 1).clamp(min=0))


def _other_first_token(step: StepMetadata, before: StepMetadata | None) -> StepMetadata:
    """Every text begins with another token on this side only, as when the beginning-of-text token is forgotten."""
    ids, begin = step.input_ids.clone(), 0
    for work in step.work:
        if work.start == 0:
            ids[0, begin] = (ids[0, begin] + 1) % 97
        begin += len(work.tokens)
    return replace(step, input_ids=ids)


def _rows_crossed(step: StepMetadata, before: StepMetadata | None) -> StepMetadata:
    """Two sequences of a decode batch get each other's block table where it is long enough."""
    if step.max_query_len > 1 or len(step.work) < 2:
        return step
    table = step.block_table.clone()
    if bool((table[:2] >= 0).all(0).eq((table[:2] >= 0).any(0)).all()):
        table[:2] = table[:2].flip(0)
    return replace(step, block_table=table)


def _one_slot_late(write: Callable[..., None], layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Decode writes its token one slot too far, where the block has one."""
    write(layer, key, value, slots + 1 if len(slots) == 1 else slots)


def _last_of_chunk_lost(write: Callable[..., None], layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    if len(slots) > 1:
        slots = slots.clone()
        slots[-1] = -1
    write(layer, key, value, slots)


def _k_as_v(write: Callable[..., None], layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    write(layer, key, key if key.shape == value.shape else value, slots)


def _one_head_not_written(write: Callable[..., None], layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """In layer 1 the last KV head's values are zero."""
    if layer == 1:
        value = value.clone()
        value[:, -1] = 0
    write(layer, key, value, slots)


def _padding_written(write: Callable[..., None], layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """A chunk is padded to a multiple of 8 tokens, and the padding is written behind its end."""
    more = -len(slots) % 8
    if more and len(slots) > 1:
        last = int(slots[-1])
        slots = torch.cat([slots, torch.arange(last + 1, last + 1 + more, device=slots.device)])
        key, value = (torch.cat([x, torch.zeros_like(x[:1]).expand(more, *x.shape[1:])]) for x in (key, value))
    write(layer, key, value, slots)


def _written_unscaled(engine: PagedEngine) -> None:
    """K and V are quantised as if the scales were 1, and read with the scales."""
    pool = engine.pool
    honest, scales = pool.write, pool.scales

    def faulty(layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        pool.scales = None
        try:
            honest(layer, key, value, slot_mapping)
        finally:
            pool.scales = scales

    pool.write = faulty  # type: ignore[method-assign]


def _told(change: Callable[[Callable[[int], Scales], int], Scales]) -> Callable[[PagedEngine], None]:
    """The cache is written with its own scales; the kernel is told ``change(scale, layer)``."""

    def make(engine: PagedEngine) -> None:
        pool = engine.pool
        write, scale, writing = pool.write, pool.scale, [False]

        def faulty(layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
            writing[0] = True
            try:
                write(layer, key, value, slot_mapping)
            finally:
                writing[0] = False

        pool.write = faulty  # type: ignore[method-assign]
        pool.scale = lambda layer: scale(layer) if writing[0] else change(scale, layer)  # type: ignore[method-assign]

    return make


def _blocks(change: Callable[[BlockManager], None]) -> Callable[[PagedEngine], None]:
    return lambda engine: change(engine.blocks)


def _fork_without_copy(blocks: BlockManager) -> None:
    """A shared block that is written to is not copied first."""
    blocks._unshares = lambda owned, num_tokens: False  # type: ignore[method-assign]


def _copy_forgotten(engine: PagedEngine) -> None:
    """The fork gets its own block, and what the shared one holds is not copied into it."""
    engine.pool.copy_blocks = lambda pairs: None  # type: ignore[method-assign]


def _freed_while_in_use(blocks: BlockManager) -> None:
    """Freeing a sequence gives a shared block back although another still reads it."""
    honest = blocks.fork

    def fork(parent: int, child: int) -> None:
        honest(parent, child)
        for block in blocks.table(child):
            blocks._refs[block] -= 1
            blocks._free.appendleft(block)

    blocks.fork = fork  # type: ignore[method-assign]


def _one_block_for_two(blocks: BlockManager) -> None:
    """Every second time a block is handed out, it stays on the free list."""
    honest, turn = blocks._take, [0]

    def take(count: int) -> list[int]:
        taken = honest(count)
        for block in taken:
            turn[0] += 1
            if turn[0] % 2 == 0:
                blocks._free.appendleft(block)
        return taken

    blocks._take = take  # type: ignore[method-assign]


def _kept_in_dtype(engine: PagedEngine) -> None:
    """The cache that was asked for in fp8 is kept in fp16, without a word."""
    pool = engine.pool
    if pool.scales is None:
        return
    layers = range(len(pool.keys))
    pool.keys = [torch.full(pool.keys[i].shape, torch.nan, dtype=torch.float16) for i in layers]
    pool.values = [torch.full(pool.values[i].shape, torch.nan, dtype=torch.float16) for i in layers]
    pool.scales = None


ENGINE_FAULTS = (
    EngineFault(
        "lengths_of_step_before",
        "stale_metadata",
        "decode is given the lengths of the step before",
        _metadata(_stale_lengths),
    ),
    EngineFault(
        "table_of_step_before",
        "stale_metadata",
        "decode is given the block table of the step before",
        _metadata(_stale_table),
    ),
    EngineFault(
        "positions_late",
        "stale_metadata",
        "in decode the model is told the position of the token before",
        _metadata(_positions_late),
    ),
    EngineFault(
        "other_first_token",
        "input_mismatch",
        "the model is given another first token than the text has",
        _metadata(_other_first_token),
    ),
    EngineFault(
        "tables_crossed",
        "stale_metadata",
        "two sequences get each other's block table",
        _metadata(_rows_crossed),
        also=frozenset({"wrong_block"}),
    ),
    EngineFault("one_slot_late", "slot_write", "decode writes its token one slot too far", _write(_one_slot_late)),
    EngineFault(
        "last_of_chunk_lost", "slot_write", "the last token of a chunk is not written", _write(_last_of_chunk_lost)
    ),
    EngineFault("k_as_v", "slot_write", "K is written where V belongs", _write(_k_as_v)),
    EngineFault(
        "one_head_not_written",
        "slot_write",
        "one layer's last KV head is written as zeros",
        _write(_one_head_not_written),
    ),
    EngineFault(
        "padding_written", "slot_write", "padded tokens are written behind the end of a chunk", _write(_padding_written)
    ),
    EngineFault(
        "written_unscaled",
        "slot_write",
        "K and V are quantised without their scales",
        _written_unscaled,
        quantized=True,
        also=frozenset({"kv_scale"}),
    ),
    EngineFault(
        "scales_not_passed",
        "kv_scale",
        "the kernel is not told the scales",
        _told(lambda scale, layer: (None, None)),
        quantized=True,
    ),
    EngineFault(
        "scales_of_layer_zero",
        "kv_scale",
        "all layers are read with layer 0's scales",
        _told(lambda scale, layer: scale(0)),
        quantized=True,
    ),
    EngineFault(
        "fork_without_copy",
        "prefix_reuse",
        "a fork writes into the block it shares",
        _blocks(_fork_without_copy),
        also=frozenset({"slot_write"}),
    ),
    EngineFault(
        "copy_forgotten",
        "prefix_reuse",
        "a fork's block is not filled with what the shared one holds",
        _copy_forgotten,
        also=frozenset({"slot_write"}),
    ),
    EngineFault(
        "freed_while_in_use",
        "page_leak",
        "a fork's blocks are handed out again",
        _blocks(_freed_while_in_use),
        also=frozenset({"slot_write", "prefix_reuse"}),
    ),
    EngineFault(
        "one_block_for_two",
        "page_leak",
        "blocks in use are handed out again",
        _blocks(_one_block_for_two),
        also=frozenset({"slot_write"}),
    ),
    EngineFault(
        "kept_in_fp16", "dtype_ignored", "a cache asked for in fp8 is kept in fp16", _kept_in_dtype, quantized=True
    ),
)
