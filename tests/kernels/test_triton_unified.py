"""triton_unified takes a mixed batch whole, in one launch, and shares it out without empty tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pabench_kernels.contract import PagedBatch
from pabench_kernels.dispatch import Dispatcher
from pabench_kernels.request import parse_request
from pabench_kernels.triton_unified import _tiles, triton_unified
from tests.kernels import cases
from tests.kernels.cases import BF16, Case, changed, make_batch
from tests.kernels.mutants import mutated
from tests.kernels.oracle_for_tests import oracle, wrong_rows


def mixed(case: Case, queries: list[int], monkeypatch: pytest.MonkeyPatch) -> PagedBatch:
    """A batch of these query lengths."""
    monkeypatch.setattr(cases, "query_lens", lambda *_: queries)
    return make_batch(case, "prefill")


BATCHES = {
    "decode-beside-a-prompt": (Case(lens=(40, 9, 70, 0, 17)), [1, 1, 70, 1, 1]),
    "chunks-with-a-past": (Case(lens=(66, 40, 130), dtype=BF16, window=50), [33, 1, 2]),
    "bidirectional": (Case(lens=(66, 40, 30), causal=False), [33, 1, 2]),
    "many": (Case(lens=tuple(range(1, 38)), group=5, kv_heads=1), [n if n % 9 == 0 else 1 for n in range(1, 38)]),
    "group-71": (Case(lens=(20, 3, 9), group=71, kv_heads=1), [11, 1, 1]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_mixed_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed(*BATCHES[name], monkeypatch)
    assert batch.phases == {"prefill", "decode"}
    assert wrong_rows(triton_unified(batch), batch, oracle(batch)) == []


def test_dispatch_gives_it_the_whole_batch_in_one_proved_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(parse_request("triton_unified"))
    dispatcher(mixed(*BATCHES["decode-beside-a-prompt"], monkeypatch), 5)
    assert dispatcher.trace.launched == {("triton_unified", 5, "mixed"): 1}
    assert dispatcher.proof() == "proved"


def test_sequences_without_a_query_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search must pass over sequences that begin where the next one does."""
    batch = mixed(Case(lens=(40, 9, 70, 12, 17)), [1, 1, 70, 1, 1], monkeypatch)
    none = torch.zeros(1, dtype=torch.int32)
    starts, lens, table = batch.query_start_loc, batch.seq_lens, batch.block_table
    nowhere = torch.full_like(table[:1], -1)
    padded = changed(
        batch,
        seq_lens=torch.cat([none, lens[:2], none, none, lens[2:], none]),
        query_start_loc=torch.cat([starts[:1], starts[:3], starts[2:3], starts[2:], starts[-1:]]),
        block_table=torch.cat([nowhere, table[:2], nowhere, nowhere, table[2:], nowhere]),
    )
    assert wrong_rows(triton_unified(padded), padded, oracle(padded)) == []


def test_tiles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences, three heads a group: 74 tokens are 222 rows, and tiles of 64 rows are 3 and one for each end."""
    batch = mixed(*BATCHES["decode-beside-a-prompt"], monkeypatch)
    assert _tiles(batch, 64) == (8, 0)  # not the 5 × ⌈210 / 64⌉ = 20 of equal shares
    alike = mixed(Case(lens=(40, 9, 70)), [1, 1, 1], monkeypatch)
    assert _tiles(alike, 4) == (3, 1)


FAULTS = {
    "search-stops-early": ("while width > 0:", "while width > 1:"),
    "first-row-of-the-batch": ("- row_start * GROUP // ROWS - row_seq) * ROWS", "- row_seq) * ROWS"),
    "keys-of-the-first-tile": ("key_first + ROWS - 1) // GROUP", "ROWS - 1) // GROUP"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_search_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated("triton_attend", *FAULTS[fault], tmp_path)
    monkeypatch.setattr("pabench_kernels.triton_common.attention_kernel", module.attention_kernel)
    batch = mixed(*BATCHES["decode-beside-a-prompt"], monkeypatch)
    assert wrong_rows(triton_unified(batch), batch, oracle(batch)) != []
