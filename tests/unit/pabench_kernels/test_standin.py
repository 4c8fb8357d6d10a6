"""Tensors that stand in for a GPU's, and the target that a batch is on."""

from __future__ import annotations

import pytest
import torch

from pabench_kernels.standin import StandIn, pretending, standin
from pabench_kernels.target import TARGETS, UnknownTargetError, find_target


def test_a_standin_is_on_the_gpu_and_has_values_and_strides():
    x = standin(torch.arange(24).view(2, 3, 4))
    assert (x.device.type, x.is_cuda, x.get_device()) == ("cuda", True, 0)
    assert x[1].transpose(0, 1).stride() == (1, 4)
    assert x[0, 0].tolist() == [0, 1, 2, 3]
    assert int(x.max()) == 23
    assert x.cpu().device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_empty(3),
        lambda x: torch.empty_like(x),
        lambda x: torch.zeros(3, device=x.device),
        lambda x: torch.zeros(3, device="cuda"),
        lambda x: torch.zeros(3).to("cuda"),
        lambda x: torch.zeros(3).to(x.device, torch.int8),
        lambda x: x.view(torch.int32).float(),
    ],
)
def test_what_is_made_from_it_is_on_the_gpu_too(make):
    with pretending(TARGETS["sm_90"]):
        found = make(standin(torch.ones(3)))
    assert isinstance(found, StandIn)
    assert found.device.type == "cuda"


def test_torch_cuda_answers_for_the_target_and_only_inside():
    before = torch.cuda.get_device_capability
    with pretending(TARGETS["sm_90"]):
        other = standin(torch.ones(1)).device
    with pretending(TARGETS["sm_80"]):
        assert standin(torch.ones(1)).device != other  # an answer remembered by device is right for this one only
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties("cuda").multi_processor_count == 108
    assert torch.cuda.get_device_capability is before


def test_a_mistyped_target_is_answered_with_the_right_one():
    with pytest.raises(UnknownTargetError, match=r"unknown target 'gfx924'; did you mean 'gfx942'"):
        find_target("gfx924")
