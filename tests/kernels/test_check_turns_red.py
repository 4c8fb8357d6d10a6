"""Negative controls: the check that the contract tests rely on sees each of these faults."""

from __future__ import annotations

import pytest
import torch

from pabench_kernels.contract import PagedBatch
from pabench_kernels.torch_paged import torch_paged
from tests.kernels.cases import BF16, FP32, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows


def zeros(batch: PagedBatch) -> torch.Tensor:
    return torch.zeros_like(torch_paged(batch))


def nan_in_one_head(batch: PagedBatch) -> torch.Tensor:
    out = torch_paged(batch)
    out[0, 2, 5] = torch.nan
    return out


def newest_token_hidden(batch: PagedBatch) -> torch.Tensor:
    return torch_paged(changed(batch, seq_lens=batch.seq_lens - 1))


def scale_a_tenth_too_large(batch: PagedBatch) -> torch.Tensor:
    return torch_paged(changed(batch, scale=batch.scale * 1.1))


def wrong_kv_head(batch: PagedBatch) -> torch.Tensor:
    return torch_paged(changed(batch, key_cache=batch.key_cache.flip(2), value_cache=batch.value_cache.flip(2)))


FAULTS = [zeros, nan_in_one_head, newest_token_hidden, scale_a_tenth_too_large, wrong_kv_head]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_seen(fault: object, dtype: torch.dtype) -> None:
    batch = make_batch(Case(dtype=dtype, lens=(257, 40)), "decode")
    truth = oracle(batch)
    assert wrong_rows(torch_paged(batch), batch, truth) == []
    wrong = wrong_rows(fault(batch), batch, truth)  # type: ignore[operator]
    if fault is nan_in_one_head:
        assert wrong == [(0, 2)]
    elif fault is newest_token_hidden:  # moves a row by that token's weight only: random data is nearly blind to it
        assert wrong
    elif fault is newest_token_hidden and dtype == BF16:
        assert wrong, "where the newest token weighs less than bf16 rounding it cannot be missed; elsewhere it is"
    else:
        assert len(wrong) >= 10, "nearly all of the 12 rows"
