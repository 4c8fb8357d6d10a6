"""When a selftest's numbers may gate, and what is said where they may not."""

import pytest

from pabench.selftest.result import SelftestResult, bound


def result(**changes):
    fields = {
        "kernel": "plain",
        "seed": 0,
        "mutants": 60,
        "killed": bound(60, 60),
        "named_first": bound(58, 60),
        "clean": 520,
        "false_alarms": bound(0, 520),
        "survivors": (),
        "misnamed": (),
        "alarms": (),
        "duration_s": 1.0,
        "matrix": (),
    }
    return SelftestResult(**fields | changes)


def test_enough_of_everything_gates():
    assert result().gating


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mutants": 49}, "only 49 mutants"),
        ({"survivors": ("zeros",)}, "1 mandatory mutants live: zeros"),
        ({"named_first": bound(53, 60)}, "only 53 of 60 were named right first"),
        ({"clean": 499}, "only 499 clean cases"),
        ({"false_alarms": bound(1, 520), "alarms": ("torch_paged fp32: off",)}, "1 false alarms, e.g. torch_paged"),
    ],
)
def test_a_shortcoming_is_said_and_does_not_gate(changes, words):
    found = result(**changes)
    assert not found.gating
    assert words in "; ".join(found.shortcomings)


def test_bounds_are_exact():
    """Clopper–Pearson by hand: with no failure in n the upper 97.5 % bound is 1 − 0.025^(1/n)."""
    assert bound(0, 500).high == pytest.approx(1 - 0.025 ** (1 / 500), rel=1e-6)
    assert (bound(0, 0).low, bound(0, 0).high) == (0.0, 1.0)
