"""triton_split: the number of parts changes nothing, and a merge that is wrong is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pabench_kernels.contract import PagedBatch
from pabench_kernels.triton_split import MAX_SPLITS, planned_splits, triton_split, with_splits
from tests.kernels.cases import BF16, E4M3, Case, changed, make_batch
from tests.kernels.mutants import mutated
from tests.kernels.oracle_for_tests import oracle, wrong_rows

LONG = Case(lens=(257, 0, 40, 1, 16), sinks=True, group=2)
CASES = {
    "sinks": LONG,
    "window": Case(lens=(257, 0, 40), window=33),
    "bf16": Case(lens=(257, 17), dtype=BF16),
    "e4m3-everything": Case(
        lens=(130, 0, 21), kv_dtype=E4M3, scales="token", alibi=True, cap=8.0, sinks=True, window=100, block_size=7
    ),
}


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 17, MAX_SPLITS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_number_of_parts_gives_the_same_answer(case: Case, splits: int) -> None:
    """Also more parts than a sequence has blocks, or keys: 17 and 128 parts of one key."""
    batch = make_batch(case, "decode")
    truth = oracle(batch)
    kernel = with_splits(splits)
    out, lse = kernel(batch, return_lse=True)
    assert wrong_rows(out, batch, truth) == []
    np.testing.assert_allclose(lse.double().numpy(), truth.lse, rtol=4e-6, atol=4e-6)
    assert wrong_rows(kernel(batch), batch, truth) == []


@pytest.mark.parametrize("splits", [0, -1, MAX_SPLITS + 1])
def test_an_impossible_number_of_parts_is_refused(splits: int) -> None:
    with pytest.raises(ValueError, match=f"splits must lie in 1…128, got {splits}"):
        with_splits(splits)


def test_the_fixed_kernel_is_the_same_kernel_to_the_trace() -> None:
    kernel = with_splits(3)
    assert kernel.name == triton_split.name
    assert kernel.phases == {"decode"}
    assert kernel.has_lse


FAULTS = {
    "weights-ignored": ("weights = tl.exp(tops - base[:, None])", "weights = tl.where(live, 1.0, 0.0)"),
    "totals-ignored": ("tl.reduce(weights * totals, 1", "tl.reduce(weights, 1"),
    "last-part-lost": (
        "live = row_live[:, None] & (split < num_splits)",
        "live = row_live[:, None] & (split < num_splits - 1)",
    ),
    "sink-in-each-part": ("HAS_SINKS=False", "HAS_SINKS=batch.sinks is not None"),
    "sink-forgotten": ("total += tl.where(empty, 0.0, tl.exp(sink - base))", "total += 0.0"),
    "empty-part-counts": ('other=float("-inf"))\n    totals', "other=0.0)\n    totals"),
    "empty-row-sees-its-sink": ("empty = top == float", "empty = top == -float"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_merge_is_seen(fault: str, tmp_path: Path) -> None:
    module = mutated("triton_split", *FAULTS[fault], tmp_path)
    batch = make_batch(LONG, "decode")
    truth = oracle(batch)
    out, lse = module.with_splits(3)(batch, return_lse=True)
    lse_is_right = np.allclose(lse.double().numpy(), truth.lse, rtol=4e-6, atol=4e-6)
    assert wrong_rows(out, batch, truth) != [] or not lse_is_right


def test_an_unchanged_copy_is_right(tmp_path: Path) -> None:
    """What the faults are seen by is the fault, not the copying."""
    module = mutated("triton_split", "MAX_SPLITS = 128", "MAX_SPLITS = 127", tmp_path)
    batch = make_batch(LONG, "decode")
    assert wrong_rows(module.with_splits(3)(batch), batch, oracle(batch)) == []


def batch_of(seqs: int, kv_heads: int, tokens: int, window: int | None = None) -> PagedBatch:
    batch = make_batch(Case(lens=(1,) * seqs, kv_heads=kv_heads, group=1, head_dim=16), "decode")
    return changed(batch, max_seq_len=tokens, sliding_window=window)


def test_the_plan_fills_processors_but_keeps_parts_long() -> None:
    """By hand: 64 processors under the interpreter, two programs each, parts of at least 128 keys, 32 at most."""
    assert planned_splits(batch_of(1, 1, 65536)) == 32
    assert planned_splits(batch_of(1, 8, 65536)) == 16
    assert planned_splits(batch_of(64, 2, 65536)) == 1
    assert planned_splits(batch_of(1, 1, 300)) == 3
    assert planned_splits(batch_of(1, 1, 0)) == 1
    assert planned_splits(batch_of(1, 1, 65536, window=200)) == 2
