"""What every adapter's tests ask: the shared table of shapes, with and without NaN where no token lies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pabench_kernels.contract import Kernel, PagedBatch
from tests.kernels.cases import CASES, INT8, Case, Phase, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows


def without_nan(batch: PagedBatch) -> PagedBatch:
    """The batch with plausible numbers in place of NaN; integers have none."""

    def finite(x: torch.Tensor, number: float) -> torch.Tensor:
        return x if x.dtype == INT8 else x.float().nan_to_num(number).to(x.dtype)

    return changed(batch, key_cache=finite(batch.key_cache, 0.5), value_cache=finite(batch.value_cache, 3.0))


def supported(kernel: Kernel, cases: Iterable[Case]) -> list[tuple[Case, Phase]]:
    phases: tuple[Phase, ...] = ("decode", "prefill")
    return [(c, p) for c in cases for p in phases if not kernel.unsupported(make_batch(c, p))]


def wrong(kernel: Kernel, case: Case, phase: Phase, *, nan: bool = False) -> list[tuple[int, int]]:
    """(token, head) rows that are off the oracle."""
    batch = make_batch(case, phase)
    batch = batch if nan else without_nan(batch)
    return wrong_rows(kernel(batch), batch, oracle(batch))


def disagreements(kernel: Kernel, pairs: Iterable[tuple[Case, Phase]]) -> dict[str, int]:
    """Readable name of each case that is off → number of wrong rows."""
    names = {id(case): name for name, case in CASES.items()}
    found = {f"{names.get(id(c), c)} {p}": len(wrong(kernel, c, p)) for c, p in pairs}
    return {name: rows for name, rows in found.items() if rows}
