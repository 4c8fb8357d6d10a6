"""FlexAttention, which every torch brings along, agrees with the oracle; what is known of it stays known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pabench_kernels.adapters.flex_adapter import flex_paged, flex_paged_compiled
from tests.kernels.adapters.checks import disagreements, supported, without_nan, wrong
from tests.kernels.cases import BF16, CASES, FP16, FP32, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

SOME = ["gqa71", "value-dim-larger", "window-long", "bidirectional-window", "alibi", "soft-cap", "bf16"]


def test_it_agrees_with_the_oracle_on_some_shapes():
    pairs = supported(flex_paged, [CASES[name] for name in SOME])
    assert len(pairs) == 2 * len(SOME)
    assert disagreements(flex_paged, pairs) == {}


@pytest.mark.slow
def test_it_agrees_with_the_oracle_on_every_shape_it_supports():
    pairs = supported(flex_paged, CASES.values())
    assert len(pairs) >= 70
    assert {c.dtype for c, _ in pairs} == {FP32, FP16, BF16}
    assert disagreements(flex_paged, pairs) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "window-7", "alibi-window", "bf16"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_compiled_it_agrees_too(case, phase):
    assert flex_paged_compiled.unsupported(make_batch(CASES[case], phase)) == []
    assert wrong(flex_paged_compiled, CASES[case], phase) == []


def test_lse_is_the_log_of_the_denominator():
    batch = without_nan(make_batch(CASES["window-7"], "prefill"))
    _, lse = flex_paged(batch, return_lse=True)
    np.testing.assert_allclose(lse.double().numpy(), oracle(batch).lse, rtol=4e-6, atol=4e-6)


def test_that_comparison_sees_a_wrong_scale():
    batch = without_nan(make_batch(CASES["plain"], "decode"))
    assert wrong_rows(flex_paged(changed(batch, scale=batch.scale * 1.01)), batch, oracle(batch))


def test_nan_in_a_slot_without_a_token_reaches_the_output():
    """A finding about FlexAttention: what is masked gets the weight 0, and 0 × NaN is NaN."""
    assert wrong(flex_paged, Case(lens=(17,)), "decode", nan=True)


def test_fp16_loses_weights_that_are_small():
    """A finding about uncompiled FlexAttention: weights are rounded to fp16, and below 6e-5 little is left of them."""
    keys = 512
    batch = without_nan(make_batch(Case(dtype=FP16, lens=(keys,), group=1, kv_heads=1), "decode"))
    key, value = torch.zeros_like(batch.key_cache), torch.zeros_like(batch.value_cache)
    key[::2, :, :, 0], value[1::2] = 1.0, 1.0  # half of the blocks score 8 with value 0, the others 0 with value 1
    query = torch.zeros_like(batch.query)
    query[..., 0] = 8 / batch.scale
    flat = changed(batch, query=query, key_cache=key, value_cache=value)
    high = int((flat.block_table[0, : keys // 16] % 2 == 0).sum()) * 16
    exact = (keys - high) / (keys - high + high * np.exp(8.0))
    error = abs(float(flex_paged(flat)[0, 0, 0]) / exact - 1)
    assert error > 0.005


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (CASES["sinks"], "FlexAttention has no sinks"),
        (CASES["e4m3-unscaled"], "FlexAttention has no float8_e4m3fn cache for float32 queries"),
        (CASES["scaled-fp32-cache"], "FlexAttention takes no k_scale per tensor for a float32 cache"),
    ],
)
def test_limits_are_declared(case, reason):
    assert reason in flex_paged.unsupported(make_batch(case, "decode"))


def test_a_table_wider_than_the_pool_is_declared():
    batch = make_batch(Case(window=7, lens=(64,)), "decode")
    small = changed(batch, key_cache=batch.key_cache[:3], value_cache=batch.value_cache[:3])
    assert flex_paged.unsupported(small) == ["FlexAttention's PagedAttention maps at most the pool's 3 blocks, got 4"]
