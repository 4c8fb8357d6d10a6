import math

import pytest
import torch

from pabench.reference.oracle import attention_oracle, dense_attention


def test_two_keys_by_hand():
    """Scores ln 3 and 0: weights 3/4 and 1/4."""
    query = torch.tensor([[[1.0]]])
    key = torch.tensor([[[math.log(3)]], [[0.0]]])
    value = torch.tensor([[[4.0]], [[8.0]]])
    found = attention_oracle(query, key, value, query_positions=torch.tensor([1]), scale=1.0)
    assert found.out.item() == pytest.approx(5.0, abs=1e-6)


def test_a_sink_joins_the_denominator_only():
    """Scores 0 and 0 with sink ln 2: weights 1/4, 1/4, and 2/4 to nothing."""
    query = torch.zeros(1, 1, 1)
    value = torch.tensor([[[4.0]], [[8.0]]])
    found = attention_oracle(
        query,
        torch.zeros(2, 1, 1),
        value,
        query_positions=torch.tensor([1]),
        scale=1.0,
        sinks=torch.tensor([math.log(2)]),
    )
    assert found.out.item() == pytest.approx(3.0, abs=1e-6)


def test_a_window_of_two_sees_two_keys():
    value = torch.tensor([[[1.0]], [[10.0]], [[100.0]], [[1000.0]]])
    found = attention_oracle(
        torch.zeros(4, 1, 1), torch.zeros(4, 1, 1), value, query_positions=torch.arange(4), scale=1.0, window=2
    )
    assert found.out.flatten().tolist() == [1.0, 5.5, 55.0, 550.0]


def test_the_cap_bounds_scores():
    query, key = torch.tensor([[[10.0]]]), torch.tensor([[[10.0]], [[0.0]]])
    value = torch.tensor([[[1.0]], [[0.0]]])
    found = attention_oracle(query, key, value, query_positions=torch.tensor([1]), scale=1.0, soft_cap=1.0)
    assert found.out.item() == pytest.approx(math.e / (math.e + 1), abs=1e-6)  # tanh(100) = 1


def test_alibi_is_slope_times_distance():
    value = torch.tensor([[[1.0]], [[0.0]]])
    found = attention_oracle(
        torch.zeros(1, 1, 1), torch.zeros(2, 1, 1), value, query_positions=torch.tensor([1]), scale=1.0,
        alibi_slopes=torch.tensor([math.log(3)]),
    )  # fmt: skip
    assert found.out.item() == pytest.approx(0.25, abs=1e-6)  # weights 1/3 : 1


@pytest.mark.parametrize(
    "feature",
    [
        {},
        {"window": 5},
        {"soft_cap": 2.0},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        {"sinks": torch.ones(4)},
    ],
)
def test_dense_attention_is_near_the_oracle(feature):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((6, 4), (20, 2), (20, 2)))
    arguments = {"query_positions": torch.arange(14, 20), "scale": 0.25, **feature}
    oracle = attention_oracle(q, k, v, **arguments)
    torch.testing.assert_close(dense_attention(q, k, v, **arguments).double(), oracle.out, atol=2e-6, rtol=0)


def test_size_does_not_vanish_where_values_cancel():
    value = torch.tensor([[[1.0]], [[-1.0]]])
    found = attention_oracle(
        torch.zeros(1, 1, 1), torch.zeros(2, 1, 1), value, query_positions=torch.tensor([1]), scale=1.0
    )
    assert found.out.item() == 0.0
    assert found.size.item() == pytest.approx(math.sqrt(0.5))
