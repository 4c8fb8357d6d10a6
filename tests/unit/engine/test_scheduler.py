import pytest

from pabench.engine.scheduler import Scheduler


def test_decodes_go_before_prompt_chunks_under_one_budget():
    scheduler = Scheduler(token_budget=5)
    scheduler.add(0, range(9))
    scheduler.add(1, [7])
    assert dict(scheduler.schedule()) == {1: (7,), 0: (0, 1, 2, 3)}
    assert dict(scheduler.schedule()) == {0: (4, 5, 6, 7, 8)}
    assert scheduler.idle


def test_a_sequence_left_out_is_served_next():
    scheduler = Scheduler(token_budget=2)
    for seq in range(3):
        scheduler.add(seq, [seq] * 4)
    served = [seq for _ in range(6) for seq in scheduler.schedule()]
    assert set(served[:3]) == {0, 1, 2}
    assert scheduler.idle


def test_at_most_max_seqs_sequences_a_step():
    scheduler = Scheduler(token_budget=100, max_seqs=2)
    for seq in range(3):
        scheduler.add(seq, [1])
    assert len(scheduler.schedule()) == 2


def test_dropped_tokens_are_not_computed():
    scheduler = Scheduler()
    scheduler.add(0, [1, 2])
    scheduler.drop(0)
    assert scheduler.idle


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget and max_seqs must be at least 1, got 0"):
        Scheduler(token_budget=0)
