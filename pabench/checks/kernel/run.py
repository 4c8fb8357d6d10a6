"""All kernel cases of a suite: planned for all requests, then judged request by request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from pabench.cases import precisions
from pabench.checks.kernel.case import KernelCase, judge_kernel
from pabench.checks.kernel.plan import plan_trials
from pabench.checks.kernel.probes import PROBES
from pabench.checks.kernel.record import kernel_record, outcome_fields
from pabench.checks.kernel.shapes import find_shape, shapes
from pabench.errors import failure_fields
from pabench.process_state import process_state_kept
from pabench.records import Record
from pabench.suite import Suite
from pabench_kernels.request import KernelRequest


def plan_kernel_cases(suite: Suite, requests: Sequence[tuple[str, str]], seed: int, device: str) -> list[KernelCase]:
    """Kernel cases of each request, (name, text), in the order they run. Raises ``UsageError`` for a bad spec."""
    wanted = suite.kernel_check
    chosen = [find_shape(text, suite.block_size) for text in wanted.batch_specs] or list(shapes())
    trials = plan_trials(
        list({shape.batch_spec: shape for shape in chosen}.values()),
        wanted.probes or tuple(PROBES),
        precisions(suite, wanted.dtypes),
        count=wanted.count,
        seed=seed + wanted.seed,
        device=device,
        everything=bool(wanted.batch_specs),
    )
    return [KernelCase(trial, name, text) for name, text in requests for trial in trials]


def judge_kernel_cases(
    cases: Sequence[KernelCase],
    request: KernelRequest,
    *,
    fail_on_fallback: bool,
    begun: Callable[[KernelCase], None],
    crashed: Callable[[BaseException], None],
    note: Callable[[str], None],
) -> Iterator[Record]:
    """One record per case, as far as the device lives: after an error that it cannot recover from nothing more comes.
    What a kernel raises costs one case."""
    for case in cases:
        note(f"{case.trial.precision.asked} {case.trial.shape.name} {case.trial.probe}")
        begun(case)
        started, lost = time.monotonic(), False
        try:
            with process_state_kept():
                outcome = judge_kernel(case.trial, request, fail_on_fallback=fail_on_fallback)
            fields = outcome_fields(outcome)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            crashed(error)
            fields = failure_fields(error)
            lost = device_is_lost(case.trial.device)
        yield kernel_record(case, **fields, duration_s=round(time.monotonic() - started, 3))
        case.trial.drop()
        if lost:
            return


def device_is_lost(device: str) -> bool:
    """Whether the device answers nothing any more, as after an illegal memory access: only a new process helps."""
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
