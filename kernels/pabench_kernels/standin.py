"""Tensors that stand in for a GPU's: they say they are on ``cuda`` and live on the CPU.

A launcher runs on them up to its launches, whatever it asks on the way (shapes, strides, views, new tensors, values),
so that what is compiled is what it would launch. What is computed on them is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pabench_kernels.target import TARGETS, Target

_device = torch.device("cuda:0")  # one index per target: launchers may remember what they asked of a device


class StandIn(Tensor):
    """A CPU tensor whose ``device`` is ``cuda:N``. Operators keep the class."""

    device = property(lambda self: _device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return _device.index or 0

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self


def standin(x: Tensor) -> Tensor:
    """``x`` of any shape and dtype: the same memory under the other name."""
    return x.as_subclass(StandIn)


class _Elsewhere(TorchFunctionMode):
    """What is asked for on the GPU is made on the CPU and stands in."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asked = dict(kwargs or {})
        if not _is_gpu(asked.get("device")) and not any(_is_gpu(a) for a in args):
            return func(*args, **asked)
        if "device" in asked and _is_gpu(asked["device"]):
            asked["device"] = "cpu"
        found = func(*("cpu" if _is_gpu(a) else a for a in args), **asked)
        return standin(found) if isinstance(found, Tensor) else found


def _is_gpu(x: Any) -> bool:
    if isinstance(x, str):
        return x == "cuda" or x.startswith("cuda:")
    return isinstance(x, torch.device) and x.type == "cuda"


@contextmanager
def pretending(target: Target) -> Iterator[None]:
    """Inside, tensors can be made on ``cuda``, and ``torch.cuda`` answers for the target."""
    properties = SimpleNamespace(
        name=target.name,
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.processors,
        warp_size=target.warp_size,
        shared_memory_per_block_optin=target.shared_bytes,
        gcnArchName=target.name,
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: len(TARGETS),
        "current_device": lambda: _device.index,
        "get_device_capability": lambda device=None: target.capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: target.name,
        "device": lambda device=None: nullcontext(),
        "synchronize": lambda device=None: None,
    }
    global _device
    before, device = {name: getattr(torch.cuda, name) for name in answers}, _device
    try:
        _device = torch.device("cuda", list(TARGETS).index(target.name))
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        with _Elsewhere():
            yield
    finally:
        _device = device
        for name, answer in before.items():
            setattr(torch.cuda, name, answer)
