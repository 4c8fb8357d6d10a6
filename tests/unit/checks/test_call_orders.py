"""State that a larger or a smaller call leaves behind can show: such calls follow one another in every precision."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pabench.checks.kernel.run import plan_kernel_cases
from pabench.runner.replay import MAX_REPLAYS, Replayer
from pabench.suite import load_suite


@pytest.fixture(scope="module")
def cases():
    return plan_kernel_cases(load_suite("kernels"), [("a", "a"), ("b", "b")], 0, "cpu")


def steps(cases, kernel, asked):
    """(first, next) shapes of consecutive cases of one kernel that differ in nothing but their lengths."""
    shapes = [c.trial.shape for c in cases if c.kernel == kernel and c.trial.precision.asked == asked]
    for one, two in pairwise(shapes):
        if len(one.seqs) == len(two.seqs) and replace(one, name="", seqs=()) == replace(two, name="", seqs=()):
            yield one, two


@pytest.mark.parametrize("asked", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("tokens", ["decode", "prefill"])
def test_a_larger_call_comes_right_before_a_smaller_one(cases, asked, tokens):
    found = [
        (one.name, two.name)
        for one, two in steps(cases, "a", asked)
        if all(longer > shorter for (_, longer), (_, shorter) in zip(one.seqs, two.seqs, strict=True))
        and all((q == 1) == (tokens == "decode") for q, _ in (*one.seqs, *two.seqs))
    ]
    assert found


@pytest.mark.parametrize("asked", ["fp32", "bf16", "fp16", "fp8"])
def test_and_a_smaller_one_right_before_a_larger(cases, asked):
    assert any(
        all(shorter < longer for (_, shorter), (_, longer) in zip(one.seqs, two.seqs, strict=True))
        for one, two in steps(cases, "a", asked)
    )


@pytest.fixture
def failed(make_record):
    def make(reason="attention_error", status="FAIL"):
        return make_record(status=status, reason=reason, check="kernel", kernel="k")

    return make


def faults(records):
    return [None if r.diagnosis is None else r.diagnosis.fault for r in records]


def test_a_kind_that_fails_alone_too_is_replayed_once(failed, make_record):
    calls = []
    replayer = Replayer(lambda case: calls.append(case) or failed())
    assert faults([replayer(n, failed(), 1) for n in range(5)]) == [None] * 5
    assert calls == [0]


def test_replays_are_bounded_and_what_they_showed_holds_for_the_rest_of_its_kind(failed, make_record):
    calls = []
    replayer = Replayer(lambda case: calls.append(case) or make_record())
    records = [replayer(n, failed(), 1) for n in range(5)]
    assert faults(records) == ["plan_reuse"] * 5
    assert calls == list(range(MAX_REPLAYS))
    assert [r.diagnosis.confidence for r in records] == [0.9] * 3 + [0.6] * 2
    assert faults([replayer(9, failed("lse"), 1)]) == [None]  # no replay is left for another kind


def test_each_kind_is_replayed(failed):
    calls = []
    replayer = Replayer(lambda case: calls.append(case) or failed())
    for n, kind in enumerate(["lse", "slot_count", "lse", "slot_count"]):
        replayer(n, failed(kind), 1)
    assert calls == [0, 1]


def test_what_passes_what_crashes_and_what_comes_first_is_left_alone(failed, make_record):
    replayer = Replayer(lambda case: pytest.fail("replayed"))
    records = [make_record(), failed(status="ERROR"), failed(status="SKIPPED")]
    assert [replayer(0, r, 1) for r in records] == records
    first = failed()
    assert replayer(0, first, 0) == first
