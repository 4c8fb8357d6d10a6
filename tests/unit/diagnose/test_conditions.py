"""Conditions separate what fails from what passes, and say nothing where nothing does."""

from pabench.diagnose.conditions import condition


def case(length, **more):
    return {"phase": "decode", "length": length, "head_dim": 64, **more}


def test_a_value_that_all_failures_share_and_no_pass_has():
    failed = [case(40, phase="prefill"), case(17, phase="prefill")]
    assert condition(failed, [case(40), case(17)]) == "only where phase is prefill, and everything there is wrong"


def test_an_interval_of_lengths():
    failed = [case(n) for n in (33, 40, 129, 256)]
    passed = [case(n) for n in (1, 17, 32, 257, 4096)]
    assert condition(failed, passed) == "only where length is 33 to 256, and everything there is wrong"


def test_a_residue_of_lengths():
    failed = [case(n) for n in (17, 33, 129, 513)]
    passed = [case(n) for n in (16, 18, 21, 43, 128, 511, 1200)]
    assert condition(failed, passed) == "only where length mod 8 is 1, and everything there is wrong"


def test_two_rules_together():
    failed = [case(600, phase="prefill"), case(700, phase="prefill")]
    passed = [case(600), case(700), case(5, phase="prefill"), case(5)]
    text = condition(failed, passed)
    assert text is not None
    assert "phase is prefill" in text
    assert "600" in text


def test_where_some_of_the_same_kind_pass_it_does_not_say_that_all_is_wrong():
    text = condition([case(40, phase="prefill")], [case(40, phase="prefill"), case(40)])
    assert text == "only where phase is prefill"


def test_nothing_separates_or_nothing_passed():
    assert condition([case(40)], [case(40)]) is None
    assert condition([case(40)], []) is None
