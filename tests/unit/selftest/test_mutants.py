"""Planted faults: enough of them, over the contract's fault names, and each changes an answer somewhere."""

import pytest
import torch

from pabench.faults import FAULTS
from pabench.selftest.catalogue import described, kernel_mutants, plain
from pabench.selftest.kernel_part import SHAPES, kernel_kills, request_of

# Faults that no mutant of a kernel or an engine can have: they are seen in tasks, over ranks, or are no fault.
ELSEWHERE = {"task_collapse", "tp_shard", "near_tie"}


def test_names_are_unique_and_faults_are_the_contracts():
    entries = list(described())
    assert len({e.name for e in entries}) == len(entries) >= 50
    assert all(e.names <= set(FAULTS) for e in entries)


def test_every_fault_of_the_contract_is_planted():
    planted = {name for e in described() for name in e.names}
    assert set(FAULTS) - planted - ELSEWHERE == set()


@pytest.mark.parametrize("name", ["heads_modulo", "token_512_lost", "lse_base_two", "tail_slot_times_zero"])
def test_a_mutant_is_killed_and_an_honest_kernel_is_not(name):
    (mutant,) = (m for m in kernel_mutants() if m.name == name)
    (kills,) = kernel_kills([mutant], request_of("plain", plain), 0)
    assert kills.killed
    assert kills.named in mutant.names


def test_without_a_change_nothing_is_killed():
    from pabench.selftest.mutant import Mutant, given

    honest = Mutant("none", "unknown", "nothing", given(lambda batch: batch))
    (kills,) = kernel_kills([honest], request_of("plain", plain), 0)
    assert not kills.killed
    assert kills.probes == {}
    assert len(kills.records) > len(SHAPES)


def test_the_plain_kernel_gives_lse_and_rounds_only_its_output():
    from pabench.cases import Precision
    from pabench.checks.kernel.case import Trial
    from pabench.checks.kernel.shapes import find_shape

    batch = Trial(find_shape("plain-decode", 16), "iid", Precision("bf16", "bf16", "bf16"), 0).inputs.batch
    out, lse = plain(batch, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert lse[batch.seq_lens == 0].isneginf().all()
