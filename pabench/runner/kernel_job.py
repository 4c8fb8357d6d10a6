"""The kernel check's work for one request: what runs in its child process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pabench.checks.kernel.case import KernelCase
from pabench.checks.kernel.run import judge_kernel_cases
from pabench.records import Record
from pabench.runner.child import emit_crash
from pabench.runner.events import At, Began, Emit, Note
from pabench_kernels.request import parse_request
from pabench_kernels.trace import watched


@dataclass(frozen=True)
class KernelJob:
    """The cases of one request, which is built from its text where it runs: a stranger's function is not sent."""

    kernel_text: str
    cases: tuple[KernelCase, ...]
    fail_on_fallback: bool


def judge_kernel_job(job: KernelJob, emit: Emit) -> Iterator[Record]:
    """One record per case. Stops early where the device is lost, which only a new process gets back."""
    request = parse_request(job.kernel_text)
    with watched(lambda layer, phase: emit(At(layer, phase))):
        yield from judge_kernel_cases(
            job.cases,
            request,
            fail_on_fallback=job.fail_on_fallback,
            begun=lambda case: emit(Began(case.case_id)),
            crashed=lambda error: emit_crash(error, emit),
            note=lambda text: emit(Note(text)),
        )
