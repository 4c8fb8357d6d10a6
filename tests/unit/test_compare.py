"""A comparison calls a regression by its name, and an honest change none."""

from __future__ import annotations

import pytest

from pabench.compare import compare
from pabench.errors import CannotJudge


@pytest.fixture
def compared(make_record, make_header):
    """``compared({"a": "PASS"}, {"a": "FAIL"})``: the comparison of two runs with these statuses."""

    def run(base, candidate, *, kernels=("k", "k"), finished=True):
        old = [make_record(c, status=s, kernel=kernels[0]) for c, s in base.items()]
        new = [make_record(c, status=s, kernel=kernels[1]) for c, s in candidate.items()]
        return compare((make_header(old), old), (make_header(new if finished else None), new))

    return run


@pytest.mark.parametrize(
    ("was", "now", "change", "regression", "code"),
    [
        ("PASS", "PASS", "unchanged", False, 0),
        ("PASS", "NEAR_TIE", "unchanged", False, 0),
        ("NEAR_TIE", "PASS", "unchanged", False, 0),
        ("PASS", "FAIL", "worse", True, 1),
        ("NEAR_TIE", "DEGENERATE", "worse", True, 1),
        ("PASS", "ERROR", "worse", True, 4),
        ("PASS", "SKIPPED", "worse", True, 3),
        ("PASS", "INCONCLUSIVE", "worse", True, 3),
        ("FAIL", "PASS", "better", False, 0),
        ("SKIPPED", "PASS", "better", False, 0),
        ("FAIL", "FAIL", "still_failing", False, 1),
        ("ERROR", "ERROR", "still_failing", False, 4),
        ("SKIPPED", "FAIL", "worse", False, 1),
        ("FAIL", "SKIPPED", "unjudged", False, 3),
        ("SKIPPED", "SKIPPED", "unchanged", False, 0),
        ("INCONCLUSIVE", "INCONCLUSIVE", "unchanged", False, 3),
    ],
)
def test_one_case_in_both_runs(compared, was, now, change, regression, code):
    result = compared({"anchor": "PASS", "a": was}, {"anchor": "PASS", "a": now})
    case = next(c for c in result.cases if c.pair_key == "model/a")
    assert (case.change, case.regression, result.exit_code) == (change, regression, code)


@pytest.mark.parametrize(("was", "code"), [("PASS", 1), ("NEAR_TIE", 1), ("FAIL", 3), ("SKIPPED", 0)])
def test_a_case_that_is_gone_is_a_regression_if_it_passed(compared, was, code):
    result = compared({"anchor": "PASS", "a": was}, {"anchor": "PASS"})
    assert [c.pair_key for c in result.of("vanished")] == ["model/a"]
    assert result.exit_code == code


@pytest.mark.parametrize(("now", "code"), [("PASS", 0), ("FAIL", 1), ("ERROR", 4), ("INCONCLUSIVE", 3), ("SKIPPED", 0)])
def test_a_new_case_counts_only_where_it_is_wrong_or_unjudged(compared, now, code):
    result = compared({"anchor": "PASS"}, {"anchor": "PASS", "a": now})
    assert [c.pair_key for c in result.of("appeared")] == ["model/a"]
    assert result.exit_code == code


def test_an_unfinished_candidate_does_not_turn_missing_cases_into_regressions(compared):
    result = compared({"a": "PASS", "b": "PASS"}, {"a": "PASS"}, finished=False)
    assert (result.exit_code, [c.regression for c in result.of("vanished")]) == (3, [False])
    assert any("did not finish" in note for note in result.notes)


def test_a_crash_outranks_a_failure_and_a_failure_what_is_unjudged(compared):
    base = {"a": "PASS", "b": "PASS", "c": "PASS"}
    assert compared(base, {"a": "ERROR", "b": "FAIL", "c": "SKIPPED"}).exit_code == 4
    assert compared(base, {"a": "PASS", "b": "FAIL", "c": "SKIPPED"}).exit_code == 1


def test_a_candidate_that_judged_nothing_cannot_be_judged(compared):
    assert compared({"a": "SKIPPED"}, {"a": "SKIPPED"}).exit_code == 3


def test_one_honest_kernel_against_another_is_no_regression(compared):
    result = compared({"a": "PASS"}, {"a": "PASS"}, kernels=("torch_paged", "triton_decode"))
    assert [(c.base_kernel, c.candidate_kernel, c.change) for c in result.cases] == [
        ("torch_paged", "triton_decode", "unchanged")
    ]
    assert result.exit_code == 0


def test_runs_of_several_kernels_pair_by_kernel_too(make_record, make_header):
    old = [make_record("a", kernel="x"), make_record("a", kernel="y")]
    new = [make_record("a", kernel="y"), make_record("a", kernel="x", status="FAIL")]
    result = compare((make_header(old), old), (make_header(new), new))
    assert {c.pair_key: c.change for c in result.cases} == {
        "model/a kernel=x": "worse",
        "model/a kernel=y": "unchanged",
    }


def test_two_cases_under_one_key_cannot_be_paired(make_record, make_header):
    twice = [make_record("a"), make_record("a", case_id="other")]
    with pytest.raises(CannotJudge, match="two cases for 'model/a'"):
        compare((make_header(twice), twice), (make_header(twice), twice))


def test_an_empty_run_cannot_be_compared(make_record, make_header):
    one = [make_record()]
    with pytest.raises(CannotJudge, match="nothing to compare"):
        compare((make_header(one), one), (make_header([]), []))


def test_environment_and_seed_differences_are_named_and_nothing_else(make_record, make_header):
    one = [make_record()]
    base = make_header(one, environment={"torch": "2.13.0", "cpu": "x"})
    candidate = make_header(one, environment={"torch": "2.11.0", "cpu": "x"}, seed=1)
    result = compare((base, one), (candidate, one))
    assert [(d.name, d.base, d.candidate) for d in result.environment] == [
        ("torch", "2.13.0", "2.11.0"),
        ("seed", 0, 1),
    ]


def test_a_pass_that_another_kernel_now_computes_is_noted(make_record, make_header, groups):
    fallback = {
        "from": "triton_decode",
        "to": "torch_paged",
        "reasons": ["x"],
        "phase": "decode",
        "layer": 0,
        "calls": 1,
    }
    execution = {**groups["execution"], "proof": "fell_back", "fallbacks": [fallback]}
    old, new = [make_record()], [make_record(execution=execution, reason="fallback_allowed")]
    result = compare((make_header(old), old), (make_header(new), new))
    assert result.notes == ["model/a: proof was 'proved' and is now 'fell_back', computed by torch_paged"]
