"""Repro files: written whole, read back bit for bit, shrunk to a call that fails in the same way; bad ones refused."""

import json
import struct
from dataclasses import replace

import pytest
import torch

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial
from pabench.checks.kernel.shapes import find_shape
from pabench.checks.replay import judge_call
from pabench.checks.shrink import fault_of, shrink
from pabench.errors import CannotJudge, ExecutionError, UsageError
from pabench.repro.format import METADATA_KEY, ReproMeta, read_meta
from pabench.repro.tensors import read_repro, write_repro
from pabench.selftest.catalogue import kernel_mutants, plain

MUTANTS = {m.name: m for m in kernel_mutants()}
BF16, FP8 = Precision("bf16", "bf16", "bf16"), Precision("fp8", "bf16", "fp8_e4m3")


def batch_of(shape, precision=BF16):
    return Trial(find_shape(shape, 16), "iid", precision, 0).inputs.batch


def meta_of(batch, fault="unknown"):
    return ReproMeta(
        kernel="k",
        origin="a test",
        fault=fault,
        layer=0,
        num_blocks=batch.key_cache.shape[0],
        scale=batch.scale,
        causal=batch.causal,
        sliding_window=batch.sliding_window,
        logits_soft_cap=batch.logits_soft_cap,
    )


@pytest.mark.parametrize("precision", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", ["plain-mixed", "window-freed-blocks", "everything", "per-head-scales"])
def test_a_call_comes_back_as_it_was(tmp_path, shape, precision):
    batch = batch_of(shape, precision)
    file = tmp_path / "call.safetensors"
    assert write_repro(file, meta_of(batch), batch) == file.stat().st_size
    meta, back = read_repro(file)
    assert meta == meta_of(batch)
    assert judge_call(back, plain(back)).passed
    torch.testing.assert_close(plain(back), plain(batch), rtol=0, atol=0)


def test_an_honest_kernel_passes_and_a_wrong_one_is_named():
    batch = batch_of("plain-decode")
    assert judge_call(batch, plain(batch)).passed
    verdict = judge_call(batch, MUTANTS["heads_rolled"].make(plain)(batch))
    assert not verdict.passed
    assert fault_of(verdict) == "head_map"


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        ("newest_hidden", "plain-decode"),
        ("heads_rolled", "plain-mixed"),
        ("past_ignored", "chunk-33-of-80"),
        ("cap_ignored", "soft-cap"),
        ("nan_in_one_head", "plain-mixed"),
    ],
)
def test_a_shrunk_call_is_smaller_and_fails_in_the_same_way(mutant, shape):
    batch = batch_of(shape)
    call = MUTANTS[mutant].make(plain)
    small, fault = shrink(batch, call)
    assert fault == fault_of(judge_call(batch, call(batch)))
    assert small.query.numel() < batch.query.numel()
    assert small.num_seqs == 1
    assert fault_of(judge_call(small, call(small))) == fault
    assert judge_call(small, plain(small)).passed


def test_a_call_that_does_not_fail_by_itself_is_no_repro():
    assert shrink(batch_of("plain-decode"), plain) is None


def test_an_empty_call_is_not_judged_as_right():
    batch = batch_of("plain-decode")
    none = torch.tensor([0], dtype=torch.int32)
    from dataclasses import replace

    empty = replace(
        batch, query=batch.query[:0], seq_lens=none[:0], query_start_loc=none, block_table=batch.block_table[:0]
    )
    assert not judge_call(empty, batch.query[:0]).passed


def _file(tmp_path, header, data=b""):
    text = json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no safetensors file"),
        (b"hello, this is text", "no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 8) + b"[" * 8, "header is not JSON"),
    ],
)
def test_what_is_no_repro_file_is_refused_in_a_sentence(tmp_path, content, words):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_meta(path)


def test_other_safetensors_files_are_refused(tmp_path):
    path = _file(tmp_path, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)
    with pytest.raises(UsageError, match="no repro file"):
        read_meta(path)


def test_another_version_is_refused(tmp_path):
    path = _file(tmp_path, {"__metadata__": {METADATA_KEY: json.dumps({"version": 9})}})
    with pytest.raises(UsageError, match="version 9; this pabench reads 1"):
        read_meta(path)


@pytest.mark.parametrize("text", ["[1]", "5", "[" * 200_000, '{"version": true}', '{"version": 1.0}'])
def test_odd_metadata_is_refused(tmp_path, text):
    with pytest.raises(UsageError):
        read_meta(_file(tmp_path, {"__metadata__": {METADATA_KEY: text}}))


@pytest.mark.parametrize("metadata", [{METADATA_KEY: 5}, {METADATA_KEY: [1]}, {}])
def test_metadata_that_is_no_text_is_refused(tmp_path, metadata):
    with pytest.raises(UsageError, match="no repro file"):
        read_meta(_file(tmp_path, {"__metadata__": metadata}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_without_a_right_answer_is_refused(tmp_path, value):
    batch = batch_of("plain-decode")
    file = tmp_path / "call.safetensors"
    write_repro(file, meta_of(batch).model_copy(update={"scale": value}), batch)
    with pytest.raises(UsageError):
        read_repro(file)


def test_a_query_or_a_scale_that_is_nan_is_refused(tmp_path):
    batch = batch_of("per-head-scales")
    file = tmp_path / "call.safetensors"
    for changed in (
        replace(batch, query=batch.query * torch.nan),
        replace(batch, k_scale=batch.k_scale * torch.inf),
        replace(batch, v_scale=-batch.v_scale),
    ):
        write_repro(file, meta_of(batch), changed)
        with pytest.raises(UsageError, match=r"NaN or Inf|negative"):
            read_repro(file)


def test_scales_of_another_number_of_heads_are_refused(tmp_path):
    batch = batch_of("per-head-scales")
    file = tmp_path / "call.safetensors"
    write_repro(file, meta_of(batch), replace(batch, k_scale=torch.ones(7)))
    with pytest.raises(UsageError, match="do not belong to one call"):
        read_meta(file)


def test_keys_that_are_nan_cannot_be_judged():
    batch = batch_of("plain-decode")
    broken = replace(batch, key_cache=torch.full_like(batch.key_cache, torch.nan))
    with pytest.raises(CannotJudge, match="keys or values are NaN"):
        judge_call(broken, plain(broken))


def test_a_pool_of_many_gigabytes_is_refused_before_anything_is_allocated(tmp_path):
    batch = batch_of("plain-decode")
    file = tmp_path / "call.safetensors"
    write_repro(file, meta_of(batch).model_copy(update={"num_blocks": 1 << 30}), batch)
    with pytest.raises(UsageError, match="needs a pool of"):
        read_meta(file)


def test_a_cut_off_file_is_refused(tmp_path):
    batch = batch_of("plain-decode")
    file = tmp_path / "call.safetensors"
    write_repro(file, meta_of(batch), batch)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be read"):
        read_repro(file)


def test_contradicting_lengths_are_refused(tmp_path):
    batch = batch_of("plain-decode")
    wrong = replace(batch, seq_lens=batch.seq_lens + 10_000)
    file = tmp_path / "call.safetensors"
    write_repro(file, meta_of(batch), wrong)
    with pytest.raises(UsageError, match="contradict"):
        read_repro(file)


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    batch = batch_of("plain-decode")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match="cannot be written"):
        write_repro(tmp_path / "file" / "call.safetensors", meta_of(batch), batch)
