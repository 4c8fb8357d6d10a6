"""OpenVINO's PagedAttention agrees with the oracle in blocks of 32; what is known of it stays known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pabench_kernels.adapters.openvino_adapter import openvino
from tests.kernels.adapters.checks import disagreements, supported, without_nan, wrong
from tests.kernels.cases import CASES, FP16, FP32, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

WRONG = "alibi-window"  # see below
CASES_32 = {name: replace(case, block_size=32) for name, case in CASES.items() if name != WRONG}


@pytest.fixture(autouse=True)
def package(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed("openvino")))


def test_it_agrees_with_the_oracle_on_every_shape_it_supports():
    pairs = supported(openvino, CASES_32.values())
    assert len(pairs) >= 40
    assert {c.dtype for c, _ in pairs} == {FP32, FP16}
    assert disagreements(openvino, pairs) == {}


def test_that_comparison_sees_a_wrong_scale():
    batch = without_nan(make_batch(CASES_32["plain"], "decode"))
    assert wrong_rows(openvino(changed(batch, scale=batch.scale * 1.01)), batch, oracle(batch))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_alibi_with_a_window_is_wrong(phase):
    """A finding about OpenVINO; each alone is right."""
    assert wrong(openvino, replace(CASES[WRONG], block_size=32), phase)


def test_nan_behind_the_tokens_reaches_the_output_of_a_window():
    """A finding about OpenVINO; without a window it does not."""
    assert wrong(openvino, Case(block_size=32, lens=(40,), window=7), "decode", nan=True)
    assert not wrong(openvino, Case(block_size=32, lens=(40,)), "decode", nan=True)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(), "has blocks of 32 tokens, got 16"),
        (CASES_32["soft-cap"], "has no soft cap"),
        (CASES_32["bidirectional"], "has no attention without a causal mask"),
        (CASES_32["bf16"], "computes in float32, float16, got bfloat16"),
        (CASES_32["only-empty"], "knows no padding rows"),
    ],
)
def test_limits_are_declared(case, reason):
    assert any(reason in found for found in openvino.unsupported(make_batch(case, "decode")))
