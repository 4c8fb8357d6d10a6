"""What must not change an answer is held against kernels that let it, and against honest ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial, judge_kernel
from pabench.checks.kernel.shapes import find_shape
from pabench_kernels.contract import ALL_PHASES, Kernel
from pabench_kernels.request import KernelRequest, parse_request

FAULTY = Path(__file__).parents[2] / "faulty" / "kernels.py"
BF16 = Precision("bf16", "bf16", "bf16")


def judged(request, probe, shape="plain-decode"):
    return judge_kernel(Trial(find_shape(shape, 16), probe, BF16, seed=0), request)


def request_of(fn):
    kernel = Kernel(name="mine", fn=fn, phases=ALL_PHASES, stranger=True)
    return KernelRequest("mine", "mine", {"prefill": kernel, "decode": kernel}, ALL_PHASES)


@pytest.mark.parametrize("kernel", ["torch_paged", "cpu_native", f"{FAULTY}:honest_whole"])
@pytest.mark.parametrize("probe", ["batching", "mutation", "reuse"])
@pytest.mark.parametrize("shape", ["plain-mixed", "window-freed-blocks", "interleaved-cache"])
def test_honest_kernels_pass(kernel, probe, shape):
    outcome = judged(parse_request(kernel), probe, shape)
    assert (outcome.status, outcome.message) == ("PASS", "")


def test_the_split_kernel_gives_one_answer_for_any_number_of_splits():
    outcome = judged(parse_request("triton_split"), "splits", "partition-edges")
    assert (outcome.status, outcome.message) == ("PASS", "")


def test_a_kernel_without_a_number_of_splits_is_skipped():
    assert judged(parse_request("torch_paged"), "splits").status == "SKIPPED"


@pytest.mark.parametrize(
    ("function", "probe", "fault"),
    [
        ("two_sequences_swapped", "batching", "batch_dependence"),
        ("reads_a_slot_behind_the_end", "mutation", "stale_read"),
        ("keeps_its_first_plan", "reuse", "plan_reuse"),
        ("splits_change_the_answer", "splits", "split_merge"),
    ],
)
def test_each_sees_its_fault(function, probe, fault):
    outcome = judged(parse_request(f"{FAULTY}:{function}"), probe)
    assert outcome.status == "FAIL"
    assert outcome.finding is not None
    assert outcome.finding.fault == fault


def test_a_kernel_that_never_gives_the_same_twice_is_not_called_stale():
    honest = parse_request(f"{FAULTY}:honest_whole").kernels["decode"].fn
    calls = iter(range(1000))

    def drifting(batch):
        return honest(batch) * (1 + 0.1 * next(calls))

    found = {probe: judged(request_of(drifting), probe).finding for probe in ("batching", "mutation")}
    assert found["batching"] is not None
    assert found["batching"].fault == "unknown"
    assert found["mutation"] is not None
    assert (found["mutation"].reason, found["mutation"].fault) == ("attention_error", "unknown")


def test_the_pool_is_as_it_was_after_a_mutation():
    trial = Trial(find_shape("interleaved-cache", 16), "mutation", BF16, seed=0)
    before = trial.inputs.base["key_cache"].view(torch.int16).clone()
    judge_kernel(trial, parse_request("torch_paged"))
    assert torch.equal(trial.inputs.base["key_cache"].view(torch.int16), before)


def test_picked_sequences_are_the_same_sequences():
    trial = Trial(find_shape("plain-mixed", 16), "iid", BF16, seed=0)
    inputs, order = trial.inputs, [3, 0]
    part = inputs.picked(order)
    assert part.shape == replace(inputs.shape, seqs=(inputs.shape.seqs[3], inputs.shape.seqs[0]))
    assert torch.equal(part.batch.query[:16], inputs.batch.query[7:23])  # 1 + 5 + 1 tokens stand before
    assert part.batch.seq_lens.tolist() == [16, 40]
    assert part.batch.query_start_loc.tolist() == [0, 16, 17]
