import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pabench.engine.block_manager import BlockManager, OutOfBlocksError


def test_a_token_has_its_slot_in_its_block():
    blocks = BlockManager(4, 8)
    blocks.allocate(0, 8)
    blocks.allocate(1, 3)
    blocks.append(0, 1)
    assert blocks.table(0) == [0, 2]
    assert [blocks.slot(0, p) for p in (0, 7, 8)] == [0, 7, 16]


def test_a_failed_append_changes_nothing():
    blocks = BlockManager(3, 4)
    blocks.allocate(0, 8)
    with pytest.raises(OutOfBlocksError, match="2 blocks of 4 tokens needed, 1 of 3 are free"):
        blocks.append(0, 5)
    assert (blocks.table(0), blocks.num_tokens(0), blocks.num_free) == ([0, 1], 8, 1)


def test_a_sequence_may_fill_the_pool_exactly():
    blocks = BlockManager(3, 4)
    blocks.allocate(0, 12)
    assert blocks.num_free == 0


def test_writing_into_a_shared_block_copies_it_first():
    blocks = BlockManager(4, 4)
    blocks.allocate(0, 6)
    blocks.fork(0, 1)
    assert blocks.append(1, 1) == [(1, 2)]
    assert (blocks.table(0), blocks.table(1)) == ([0, 1], [0, 2])
    assert blocks.append(0, 1) == []  # no longer shared


def test_a_fork_at_a_block_border_shares_without_copying():
    blocks = BlockManager(4, 4)
    blocks.allocate(0, 4)
    blocks.fork(0, 1)
    assert blocks.append(1, 1) == []
    assert blocks.table(1) == [0, 1]


def test_a_shared_block_is_free_only_after_its_last_owner():
    blocks = BlockManager(2, 4)
    blocks.allocate(0, 4)
    blocks.fork(0, 1)
    blocks.free(0)
    assert blocks.num_free == 1
    blocks.free(1)
    assert blocks.num_free == 2


def test_freeing_twice_is_refused():
    blocks = BlockManager(2, 4)
    blocks.allocate(0, 4)
    blocks.free(0)
    with pytest.raises(KeyError):
        blocks.free(0)


@given(st.lists(st.tuples(st.sampled_from("anfx"), st.integers(0, 5), st.integers(0, 9)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_operations_leaks_or_shares_by_accident(operations):
    blocks = BlockManager(12, 3)
    live: dict[int, int] = {}
    next_id = 0
    for kind, which, n in operations:
        target = list(live)[which % len(live)] if live else None
        try:
            if kind == "n" or target is None:
                blocks.allocate(next_id, n)
                live[next_id] = n
                next_id += 1
            elif kind == "a":
                blocks.append(target, n)
                live[target] += n
            elif kind == "f":
                blocks.fork(target, next_id)
                live[next_id] = live[target]
                next_id += 1
            else:
                blocks.free(target)
                del live[target]
        except OutOfBlocksError:
            pass
        owned = {b for s in live for b in blocks.table(s)}
        assert len(owned) + blocks.num_free == 12
        for s, tokens in live.items():
            assert blocks.num_tokens(s) == tokens
            assert len(blocks.table(s)) == -(-tokens // 3)


def test_pool_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        BlockManager(0, 4)


GOLDEN = Path(__file__).parent / "golden_page_trace.json"


def test_the_golden_trace_replays():
    """FIFO pool of 20 blocks of 4: insert 8 tokens into slot 1, 13 into 3, 3 into 0; two decode steps; release."""
    golden = json.loads(GOLDEN.read_text())
    blocks = BlockManager(20, 4)
    for slot, tokens in ((1, 8), (3, 13), (0, 3)):
        blocks.allocate(slot, tokens)

    def tables():
        return [(blocks.table(s) + [-1] * 4)[:4] if s in (0, 1, 3) else [-1] * 4 for s in range(5)]

    assert tables() == golden["after_insert"]
    assert blocks.num_free == golden["free"]

    def step():
        writes = []
        for slot in (0, 1, 3):
            position = blocks.num_tokens(slot)
            blocks.append(slot, 1)
            block, row = divmod(blocks.slot(slot, position), 4)
            writes.append([slot, block, row])
        return writes

    assert step() == golden["step1_writes(slot,page,row)"]
    assert tables() == golden["tables1"]
    assert step() == golden["step2"]
    blocks.free(1)
    assert blocks.num_free == golden["after_release_slot1_free"]
    blocks.free(0)
    blocks.free(3)
    assert blocks.num_free == golden["all_released_free"]
