"""`assert_kernel` from somebody's pytest: an honest kernel passes, a broken one is told what the command line tells."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from pabench.errors import CannotJudge, UsageError
from pabench.testing import assert_kernel
from pabench_kernels import PagedBatch, get_kernel

FAULTY = Path(__file__).parent.parent / "faulty" / "kernels.py"
_spec = importlib.util.spec_from_file_location("faulty_for_assert", FAULTY)
faulty = importlib.util.module_from_spec(_spec)
sys.modules["faulty_for_assert"] = faulty
_spec.loader.exec_module(faulty)
FEW = {"shapes": ["plain-decode", "plain-mixed"], "dtypes": ["bf16"]}


def test_an_honest_function_passes_on_all_hand_picked_shapes():
    verdict = assert_kernel(faulty.honest_whole, dtypes=["fp8"])
    assert verdict.passed >= 40
    (reason,) = verdict.skipped  # it does not declare that it takes scales per token and head
    assert "per_token_scales" in reason
    assert verdict.passed + sum(verdict.skipped.values()) == len(verdict.records)


@pytest.mark.parametrize(
    "kernel",
    [get_kernel("torch_paged"), "torch_paged", f"{FAULTY}:honest_whole"],
    ids=["object", "name", "file"],
)
def test_a_kernel_object_a_name_and_a_file_are_kernels_too(kernel):
    assert assert_kernel(kernel, **FEW).passed == 2


def test_limits_are_skipped_and_counted():
    verdict = assert_kernel(faulty.honest_limited, shapes=["plain-decode", "alibi"], dtypes=["bf16"])
    assert (verdict.passed, verdict.skipped) == (1, {"ALiBi is not supported": 1})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("zeros", "off the fp64 oracle by"),
        ("nan_in_one_head", "FAULT  nonfinite: NaN or Inf in the output"),
        ("raises", "ERROR  bf16 / bf16 plain-decode"),
        ("raises", "ZeroDivisionError: planted"),
        ("exits", "SystemExit"),
        ("wrong_shape", "must return a tensor"),
        ("writes_its_query", "wrote into its input 'query'"),
        ("enters_another", "entered torch_paged from inside"),
        ("lse_always_zero", "lse"),
    ],
)
def test_a_broken_function_raises_with_the_words_of_the_command_line(function, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_kernel(getattr(faulty, function), probes=["iid"], **FEW)


def test_a_failure_says_which_shape_where_how_far_off_and_how_to_see_it_again():
    with pytest.raises(AssertionError) as error:
        assert_kernel(faulty.wrong_kv_head, probes=["fingerprint"], shapes=["plain-decode"], dtypes=["fp32"], seed=3)
    text = str(error.value)
    assert text.startswith("kernels.py:wrong_kv_head: 1 of 1 judged cases are wrong (0 skipped)")
    assert "FAIL  fp32 / fp32 plain-decode:q1s17_q1s0_q1s40_q1_q1s16_q1s15 fingerprint" in text
    assert "worst in sequence" in text
    assert "minimum required tolerance" in text
    assert "; read head" in text
    assert re.search(r"pabench run kernels -k \S+kernels.py:wrong_kv_head .*--probe fingerprint .*--seed 3", text)
    again = re.search(r"assert_kernel\(…, (.*)\)$", text, re.MULTILINE)
    with pytest.raises(AssertionError) as second:
        assert_kernel(faulty.wrong_kv_head, **eval(f"dict({again[1]})"))
    assert str(second.value) == text


def test_a_local_function_has_no_command_line():
    def mine(batch: PagedBatch) -> torch.Tensor:
        return batch.query * 0

    with pytest.raises(AssertionError) as error:
        assert_kernel(mine, **FEW)
    assert "mine: 2 of 2 judged cases are wrong" in str(error.value)
    assert "pabench run" not in str(error.value)


def test_nothing_judged_never_passes():
    with pytest.raises(AssertionError, match=r"nothing was judged in bf16, all 1 cases were skipped: ALiBi is not sup"):
        assert_kernel(faulty.honest_limited, shapes=["alibi"], dtypes=["bf16"])


def test_a_dtype_in_which_nothing_was_judged_does_not_pass_beside_another():
    def only_fp32(batch):
        return faulty.honest_whole(batch)

    only_fp32.unsupported = lambda batch: [] if batch.query.dtype == torch.float32 else ["only fp32"]
    with pytest.raises(AssertionError, match="nothing was judged in bf16, all 1 cases were skipped: only fp32"):
        assert_kernel(only_fp32, shapes=["plain-decode"])
    assert assert_kernel(only_fp32, shapes=["plain-decode"], dtypes=["fp32"]).passed == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtypes": ["bf61"]}, "unknown dtype 'bf61'; did you mean 'bf16'"),
        ({"shapes": ["plain-dcode"]}, "did you mean 'plain-decode'"),
        ({"probes": ["cuont"]}, "unknown probe 'cuont'; did you mean 'count'"),
        ({"shapes": []}, "shapes must be a list of at least one name, got []"),
        ({"dtypes": "bf16"}, "dtypes must be a list of at least one name, got 'bf16'"),
    ],
)
def test_a_name_that_means_nothing_is_one_sentence(options, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        assert_kernel(faulty.honest_whole, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_cannot_be_judged():
    with pytest.raises(CannotJudge, match="torch sees no CUDA device"):
        assert_kernel(faulty.honest_whole, device="cuda")
