"""vLLM's CPU operator agrees with the oracle wherever its limits end, and what is known of it stays known."""

from __future__ import annotations

import pytest
import torch

from pabench_kernels.adapters.vllm_cpu_adapter import vllm_cpu
from tests.kernels.adapters.checks import disagreements, supported, without_nan, wrong
from tests.kernels.cases import BF16, CASES, FP16, FP32, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows


@pytest.fixture(autouse=True)
def vllm(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed("vllm-cpu")))


def test_it_agrees_with_the_oracle_on_every_shape_it_supports():
    pairs = supported(vllm_cpu, CASES.values())
    assert len(pairs) >= 60
    assert {c.dtype for c, _ in pairs} == {FP32, FP16, BF16}
    assert any(c.alibi for c, _ in pairs)
    assert any(c.sinks for c, _ in pairs)
    assert any(c.window for c, _ in pairs)
    assert disagreements(vllm_cpu, pairs) == {}


def test_that_comparison_sees_a_wrong_scale():
    batch = without_nan(make_batch(CASES["plain"], "decode"))
    assert wrong_rows(vllm_cpu(changed(batch, scale=batch.scale * 1.01)), batch, oracle(batch))


def test_nan_in_a_slot_without_a_token_reaches_the_output():
    """A finding about vLLM, whose engine zeroes blocks for that reason: the weight is 0, and 0 × NaN is NaN."""
    assert wrong(vllm_cpu, Case(lens=(17,)), "decode", nan=True)
    assert not wrong(vllm_cpu, Case(lens=(32,)), "decode", nan=True)


def test_without_a_causal_mask_its_window_bounds_both_sides():
    """Hence declared unsupported; the operator itself is asked here."""
    batch = without_nan(make_batch(CASES["bidirectional-window"], "prefill"))
    assert vllm_cpu.unsupported(batch) == ["without a causal mask vLLM's CPU operator's window bounds both sides"]
    assert wrong_rows(vllm_cpu(batch), batch, oracle(batch))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (CASES["mha"], "head_dim 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, got 40"),
        (CASES["block-17"], "multiples of 16, got 17"),
        (CASES["value-dim-smaller"], "values as wide as keys, got 32 and 64"),
        (CASES["e4m3-unscaled"], "no float8_e4m3fn cache for float32 queries"),
        (CASES["scaled-fp32-cache"], "takes no k_scale per tensor for a float32 cache"),
    ],
)
def test_limits_are_declared(case, reason):
    assert any(reason in found for found in vllm_cpu.unsupported(make_batch(case, "decode")))


def test_what_is_planned_once_can_be_run_again():
    batch = without_nan(make_batch(CASES["plain"], "prefill"))
    state = vllm_cpu.plan(batch)
    out = torch.empty_like(batch.query)
    assert vllm_cpu(batch, state=state, out=out) is out
    assert torch.equal(out, vllm_cpu(batch))
