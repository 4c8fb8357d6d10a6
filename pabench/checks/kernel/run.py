"""All kernel cases of a suite: planned, then judged one trial after the other, so that its oracle is computed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

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


def plan_kernel_cases(suite: Suite, requests: Sequence[KernelRequest], seed: int, device: str) -> list[KernelCase]:
    """Kernel cases in the order they run: all kernels of a trial together. Raises ``UsageError`` for a bad spec."""
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
    return [KernelCase(trial, r.name, r.text) for trial in trials for r in requests]


def judge_kernel_cases(
    cases: Sequence[KernelCase],
    requests: Sequence[KernelRequest],
    *,
    finished: set[str],
    fail_on_fallback: bool,
    crashed: Callable[[BaseException], None],
    note: Callable[[str], None],
) -> Iterator[Record]:
    """One record per case not yet finished. A crash costs one case."""
    by_name = {r.name: r for r in requests}
    for i, case in enumerate(cases):
        if case.case_id not in finished:
            note(f"{case.trial.precision.asked} {case.trial.shape.name} {case.trial.probe}")
            started = time.monotonic()
            try:
                with process_state_kept():
                    outcome = judge_kernel(case.trial, by_name[case.kernel], fail_on_fallback=fail_on_fallback)
                fields = outcome_fields(outcome)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                crashed(error)
                fields = failure_fields(error)
            yield kernel_record(case, **fields, duration_s=round(time.monotonic() - started, 3))
        if i + 1 == len(cases) or cases[i + 1].trial is not case.trial:
            case.trial.drop()
