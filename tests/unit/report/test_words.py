"""Sentences say what the figures say."""

from __future__ import annotations

import math

import pytest

from pabench.report.words import (
    divergence_in_words,
    fallbacks_in_words,
    number,
    quoted,
    ran_in_words,
    tokens_in_words,
    verdict_sentence,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (0.0, "0"),
        (0.8, "0.80"),
        (9.994, "9.99"),
        (31.4, "31"),
        (0.00123, "1e-3"),
        (123456.0, "1e5"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_text_is_quoted_on_one_line_and_cannot_steer_the_terminal():
    assert quoted("a\n\x1b[31mb\u202e") == '"a\\n\\u001b[31mb\\u202e"'
    assert quoted("x" * 100, limit=5) == '"xxxx…"'


@pytest.mark.parametrize(
    ("classes", "first", "words"),
    [
        ({"identical": 5}, None, "5/5 same"),
        ({"identical": 4, "near_tie": 1}, 14, "4/5 same, parts at 14: near tie"),
        ({"identical": 3, "near_tie": 1, "beyond_noise": 1}, 2, "3/5 same, parts at 2: beyond noise"),
        ({"identical": 4, "degenerate": 1}, None, "4/5 same, degenerate"),
    ],
)
def test_tokens_name_the_worst_class(make_record, groups, classes, first, words):
    tokens = {**groups["tokens"], "classes": classes, "divergence_index": {"min": first}}
    assert tokens_in_words(make_record(tokens=tokens).tokens) == words


def test_the_first_divergence_names_prompt_position_tokens_and_margin(make_record):
    text = divergence_in_words(make_record())
    for part in ("prompt 'story'", "token 14", '"␣Paris" (token 3681)', '"␣the" (token 260)', "0.40 × the noise floor"):
        assert part in text
    assert text.endswith("a near tie, which correct arithmetic may turn either way.")


@pytest.mark.parametrize("ratio", [1.01, math.nan])
def test_a_margin_above_the_floor_is_never_called_a_near_tie(make_record, groups, ratio):
    first = {**groups["tokens"]["first"], "margin_over_floor": ratio}
    assert "near tie" not in divergence_in_words(make_record(tokens={**groups["tokens"], "first": first}))


def test_a_text_that_ended_early_is_said_so(make_record, groups):
    first = {**groups["tokens"]["first"], "candidate_token": None, "candidate_text": None}
    assert "the candidate nothing (it ended)" in divergence_in_words(
        make_record(tokens={**groups["tokens"], "first": first})
    )


def test_without_a_divergence_there_is_no_sentence(make_record, groups):
    assert divergence_in_words(make_record(tokens={**groups["tokens"], "first": None})) is None


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [("PASS", "fallback_allowed", "fallback allowed"), ("FAIL", "fallback", "a fallback nobody allowed")],
)
def test_the_last_line_says_which_kernel_computed_the_result(make_record, make_header, groups, status, reason, words):
    fallback = {
        "from": "triton_decode",
        "to": "torch_paged",
        "reasons": ["x"],
        "phase": "decode",
        "layer": 0,
        "calls": 1,
    }
    execution = {
        **groups["execution"],
        "executed": {"torch_paged": 7, "triton_decode": 0},
        "proof": "fell_back",
        "fallbacks": [fallback],
    }
    records = [make_record(status=status, reason=reason, execution=execution)]
    sentence = verdict_sentence(make_header(records), records)
    assert f"computed by torch_paged; torch_paged ran in place of triton_decode in 1 case ({words})" in sentence


def test_a_fallback_in_many_layers_is_one_sentence(make_record, groups):
    fallback = {
        "from": "triton_decode",
        "to": "torch_paged",
        "reasons": ["head_dim 72"],
        "phase": "decode",
        "calls": 24,
    }
    execution = {
        **groups["execution"],
        "proof": "fell_back",
        "fallbacks": [{**fallback, "layer": n} for n in range(30)],
    }
    record = make_record(execution=execution, reason="fallback_allowed")
    assert fallbacks_in_words(record) == [
        "torch_paged ran in place of triton_decode (decode, 30 layers, 720 calls): head_dim 72"
    ]
    assert fallbacks_in_words(make_record()) == []


def test_a_run_without_fallback_speaks_of_none(make_record):
    assert ran_in_words([make_record()]) == "computed by torch_paged, triton_decode"
    assert ran_in_words([make_record(status="ERROR", execution=None)]) == "no kernel ran"


@pytest.mark.parametrize(
    ("statuses", "start"),
    [
        (["PASS", "PASS"], "PASS (exit 0): 2 of 2 judged cases agree"),
        (["PASS", "SKIPPED"], "PASS (exit 0): 1 of 1 judged case"),
        (["PASS", "FAIL"], "FAIL (exit 1): 1 of 2 judged cases is wrong"),
        (["SKIPPED"], "COULD NOT JUDGE (exit 3): 1 skipped and 0 inconclusive"),
        (["ERROR", "FAIL"], "ERROR (exit 4): 1 of 2 cases did not finish, 1 of the others"),
        ([], "NOTHING RAN (exit 5)"),
    ],
    ids=str,
)
def test_the_verdict_sentence_carries_verdict_and_exit_code(make_record, make_header, statuses, start):
    records = [make_record(str(i), status=s) for i, s in enumerate(statuses)]
    assert verdict_sentence(make_header(records), records).startswith(start)
