"""Compiler against kernel: the verdict of one case, the exit code of all."""

from __future__ import annotations

import pytest

from pabench.compilation.cases import CompileCase
from pabench.compilation.outcome import CompileOutcome, judge, summary

CASE = CompileCase("k", "decode", "sm_90", "bf16", "bf16", 64, "plain")
BINARY = {"function": "f", "num_warps": 4, "num_stages": 2, "resources": {"registers": 32, "shared_bytes": 0}}
SILENT = {"declared": [], "refusal": None, "binaries": [], "failed": None, "crashed": None}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"binaries": [BINARY]}, "PASS"),
        ({"declared": ["no"], "refusal": "no fp8"}, "PASS"),
        ({"refusal": "no fp8"}, "FAIL"),
        ({"declared": ["no"], "binaries": [BINARY]}, "FAIL"),
        ({"failed": "KeyError"}, "INCONCLUSIVE"),
        ({"declared": ["no"], "failed": "KeyError"}, "PASS"),
        ({}, "INCONCLUSIVE"),
        ({"declared": ["no"]}, "INCONCLUSIVE"),
        ({"declared": ["no"], "crashed": "SIGSEGV"}, "ERROR"),
    ],
    ids=str,
)
def test_they_must_both_accept_or_both_refuse(answer, status):
    outcome = judge(CASE, {**SILENT, **answer}, 1.0)
    assert outcome.status == status
    assert (outcome.message == "") == (answer == {"binaries": [BINARY]})


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["PASS"], 0),
        (["PASS", "FAIL"], 1),
        (["PASS", "INCONCLUSIVE"], 3),
        (["INCONCLUSIVE", "FAIL"], 1),
        (["FAIL", "ERROR"], 4),
        ([], 5),
    ],
    ids=str,
)
def test_the_exit_code_is_the_worst(statuses, code):
    found = summary([CompileOutcome(CASE, status, "") for status in statuses])
    assert found["exit_code"] == code
    assert found["passed"] == statuses.count("PASS")
