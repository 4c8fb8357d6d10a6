import math

import pytest
import torch

from pabench.reference.logits import LogitStats, compare_rows, roundoff_kld


def test_kld_and_friends_by_hand():
    """Reference (1/2, 1/2), other (3/4, 1/4): KLD = ½ ln(½/¾) + ½ ln(½/¼)."""
    stats = compare_rows(torch.tensor([0.0, 0.0]), torch.tensor([math.log(3), 0.0]), target=1)
    assert stats.kld == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-6)
    assert stats.delta_p == pytest.approx(-0.25)
    assert stats.nll_other - stats.nll_reference == pytest.approx(math.log(2))
    assert stats.max_abs == pytest.approx(math.log(3))
    assert stats.margin_shift == pytest.approx(math.log(3))


def test_equal_rows_differ_by_nothing():
    row = torch.randn(50)
    stats = compare_rows(row, row, 3)
    assert (stats.kld, stats.max_abs, stats.same_top) == (0.0, 0.0, True)


def test_a_shift_of_all_logits_is_no_divergence():
    row = torch.randn(50)
    assert compare_rows(row, row + 3.0, 0).kld < 1e-12


def test_nan_is_counted_and_never_zero():
    stats = LogitStats()
    stats.add(compare_rows(torch.zeros(4), torch.tensor([0.0, math.nan, 0.0, 0.0]), 0))
    assert stats.nonfinite == 1
    assert math.isnan(stats.mean_kld)


def test_rounding_logits_to_bf16_stays_below_a_few_times_its_own_floor():
    generator = torch.Generator().manual_seed(0)
    stats = LogitStats()
    for _ in range(200):
        row = 5 * torch.randn(1000, generator=generator)
        stats.add(compare_rows(row, row.bfloat16(), 0))
    floor = roundoff_kld(stats, torch.bfloat16)
    assert 0.1 < stats.mean_kld / floor < 3
