import math

import pytest

from pabench.checks.tokens import Divergence, FreeRun, classify, degenerate, prefix_match, repeats, until_stop

TEXT = tuple(range(100, 124))


def parted(candidate, margin=0.1, later=0.0, index=4):
    return FreeRun(TEXT, tuple(candidate), Divergence(0, index, TEXT[index], 1, margin), later)


def test_no_divergence_is_identical():
    assert classify(FreeRun(TEXT, TEXT, None), 0.2) == "identical"


def test_a_margin_inside_the_tolerance_is_a_near_tie():
    assert classify(parted(range(200, 224)), 0.2) == "near_tie"


@pytest.mark.parametrize(("margin", "later"), [(0.3, 0.0), (0.1, 0.3), (math.nan, 0.0), (0.1, math.nan)])
def test_a_margin_beyond_it_is_not_even_after_the_divergence(margin, later):
    assert classify(parted(range(200, 224), margin, later), 0.2) == "beyond_noise"


@pytest.mark.parametrize("text", [(), (7,) * 24, (7, 8) * 12, (100, 101, 102)])
def test_a_collapsed_text_is_degenerate(text):
    assert degenerate(parted(text)) is not None
    assert classify(parted(text, margin=9.0), 0.2) == "degenerate"


def test_a_loop_that_the_dense_path_would_have_gone_into_too_is_a_near_tie():
    assert classify(parted((7,) * 24, margin=0.1, later=0.1), 0.2) == "near_tie"


def test_a_loop_in_the_reference_is_the_models_own():
    looping = FreeRun((5,) * 24, (7,) * 24, Divergence(0, 0, 5, 7, 9.0), 0.0)
    assert degenerate(looping) is None


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (range(30), False),
        ((1,) * 12, True),
        ((1,) * 11, False),
        ((*range(20), *((1, 2, 3) * 4)), True),
        ((1, 2, 3, 4, 5) * 6, False),
        ((), False),
        ((1,), False),
    ],
)
def test_repeats_needs_twelve_tokens_of_a_period_up_to_four(tokens, expected):
    assert repeats(tuple(tokens)) is expected


def test_text_ends_before_the_stop_token():
    assert until_stop([1, 2, 0, 3], frozenset({0})) == (1, 2)


def test_prefix_match_is_the_share_before_the_divergence():
    assert prefix_match(parted(range(24), index=6)) == 0.25
