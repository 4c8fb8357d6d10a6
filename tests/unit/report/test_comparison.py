"""A comparison is told worst first and ends with its verdict."""

from __future__ import annotations

import io

from rich.console import Console

from pabench.compare import compare
from pabench.report.comparison import print_comparison, verdict_sentence


def printed(comparison, width=100):
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_changes_come_worst_first_and_unchanged_cases_not_at_all(make_record, make_header):
    old = [make_record("same"), make_record("bad"), make_record("gone"), make_record("fixed", status="FAIL")]
    new = [make_record("same"), make_record("bad", status="FAIL"), make_record("fixed"), make_record("new")]
    text = printed(compare((make_header(old), old), (make_header(new), new)), 80)
    places = [text.index(f"model/{name}") for name in ("bad", "gone", "fixed", "new")]
    assert places == sorted(places)
    assert "model/same" not in text
    assert "mean KLD is 9.1 × the noise floor (limit 3)" in text
    assert max(map(len, text.splitlines())) <= 80
    last = " ".join(text.split())
    assert "FAIL (exit 1): 1 worse, 1 vanished, 1 better, 1 appeared, 1 unchanged; 2 regressions." in last


def test_equal_runs_say_so_in_one_line(make_record, make_header):
    one = [make_record()]
    result = compare((make_header(one), one), (make_header(one), one))
    assert verdict_sentence(result) == "PASS (exit 0): 1 unchanged; no regression."
    assert "Environments differ" not in printed(result)


def test_a_candidate_that_was_wrong_before_does_not_pass_silently(make_record, make_header):
    one = [make_record(status="FAIL")]
    sentence = verdict_sentence(compare((make_header(one), one), (make_header(one), one)))
    assert sentence == (
        "FAIL (exit 1): 1 still failing, 0 unchanged; no regression, but the candidate gives wrong answers."
    )


def test_different_environments_are_shown(make_record, make_header):
    one = [make_record()]
    other = make_header(one, environment={"torch": "2.11.0"})
    text = printed(compare((make_header(one), one), (other, one)))
    assert "Environments differ" in text
    assert "torch: 2.13.0+cpu → 2.11.0" in text
