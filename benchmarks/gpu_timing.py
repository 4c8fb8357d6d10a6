"""Timing on a GPU for ``kernels_gpu.py``: CUDA events, cold L2, contestants in turn; and a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 << 20  # more than any L2 holds
AHEAD_CYCLES = 1_000_000  # about 0.5 ms in which the host gets ahead, so that its launch overhead is not timed


class OutOfTimeError(Exception):
    """The budget is used up."""


class Budget:
    """Seconds since the start of the program."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


class Timer:
    """Times one call after another on ``device``, in microseconds."""

    def __init__(self, device: str) -> None:
        self._gpu = device.startswith("cuda")
        self._flush = torch.empty(FLUSH_BYTES if self._gpu else 0, dtype=torch.uint8, device=device)

    def once(self, call: Callable[[], object]) -> float:
        if not self._gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def interleaved(
        self, calls: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float
    ) -> dict[str, list[float]]:
        """One call of each in turn, at least three rounds: what drifts, drifts for all."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        started = time.monotonic()
        for done in range(rounds):
            if done >= 3 and time.monotonic() - started > seconds:
                break
            for name, call in calls.items():
                samples[name].append(self.once(call))
        return samples


def copy_gb_per_s(timer: Timer, device: str, nbytes: int) -> list[float]:
    """Measured copy bandwidth, read and write counted, one figure a round."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return [2 * nbytes / us / 1e3 for us in (timer.once(lambda: target.copy_(source)) for _ in range(20))]
