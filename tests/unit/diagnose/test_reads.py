"""Structured contents say which slots, heads and blocks a kernel really reads; an honest kernel reads all of them."""

import pytest

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial
from pabench.checks.kernel.shapes import find_shape
from pabench.diagnose.reads import misreads
from pabench.selftest.catalogue import kernel_mutants, plain

MUTANTS = {m.name: m for m in kernel_mutants()}
PRECISIONS = {
    "fp32": Precision("fp32", "fp32", "fp32"),
    "bf16": Precision("bf16", "bf16", "bf16"),
    "fp8": Precision("fp8", "bf16", "fp8_e4m3"),
}


def batch_of(shape, precision="bf16"):
    return Trial(find_shape(shape, 16), "iid", PRECISIONS[precision], 0).inputs


def found(name, seq, shape="plain-decode"):
    inputs = batch_of(shape)
    return misreads(inputs.batch, MUTANTS[name].make(plain), seq)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape", ["plain-decode", "chunk-33-of-80", "window-freed-blocks", "sinks", "everything", "per-head-scales"]
)
def test_an_honest_kernel_misreads_nothing_and_the_pool_is_put_back(shape, precision):
    inputs = batch_of(shape, precision)
    _ = inputs.snapshot
    for seq, (_, length) in enumerate(inputs.shape.seqs):
        if length:
            assert misreads(inputs.batch, plain, seq) == []
    assert inputs.changed() == []


def test_the_newest_token_is_missed_in_its_block_at_its_offset():
    for misread in found("newest_hidden", 2):  # 40 tokens, blocks of 16
        assert (misread.what, misread.blocks, misread.offsets, misread.missing) == ("slots", (2,), (7,), 1)


def test_a_token_too_many_is_a_foreign_slot():
    assert {m.foreign for m in found("one_too_many", 0)} == {1}


def test_the_kv_head_that_is_read_is_named():
    assert {(m.kv_head, m.read_from) for m in found("heads_rolled", 0)} == {(0, (1,)), (1, (0,))}


def test_offset_zero_only_leaves_out_all_other_offsets_of_every_block():
    (first, _) = found("offset_zero_only", 2)
    assert first.blocks == ()
    assert first.offsets == tuple(range(1, 16))


def test_a_block_that_is_left_out_is_counted():
    (first, _) = found("first_and_last_block_only", 2)
    assert (first.blocks, first.missing) == ((1,), 16)


def test_a_kernel_that_raises_leaves_the_pool_as_it_was():
    inputs = batch_of("plain-decode")
    _ = inputs.snapshot

    def raises(batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        misreads(inputs.batch, raises, 0)
    assert inputs.changed() == []
