"""``pabench selftest``: planted faults and honest kernels through the checks, in two child processes side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pabench.runner.events import Began, Emit, Note
from pabench.runner.one_job import Refusal, run_job
from pabench.runner.options import RunOptions, Watcher
from pabench.runner.requests import describe_requests
from pabench.runner.worker import start_server
from pabench.selftest.result import CleanResult, MutantResult, SelftestResult, bound

if TYPE_CHECKING:
    from pabench_kernels.request import KernelRequest


@dataclass(frozen=True)
class SelftestJob:
    """``kernel_text`` None: the plain kernel that comes with the selftest."""

    kernel_text: str | None
    seed: int


@dataclass
class Part:
    """What one child found: by mutant its columns, and the clean cases."""

    checks: dict[str, dict[str, bool]] = field(default_factory=dict)
    rules: dict[str, dict[str, bool]] = field(default_factory=dict)
    named: dict[str, str | None] = field(default_factory=dict)
    clean: list[CleanResult] = field(default_factory=list)
    cases: list[Any] = field(default_factory=list)


def run_selftest(kernel: str | None, options: RunOptions, watcher: Watcher) -> tuple[SelftestResult, list[Any]]:
    """The result and the kernel check's records of every mutant. Raises ``PabenchError`` for what cannot be done."""
    started = time.monotonic()
    if not options.in_process:
        start_server(("kernel", "model"))
    if kernel is not None:
        (request,) = describe_requests([kernel], options)
        kernel = request.text
    job = SelftestJob(kernel, options.seed)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(
                run_job, target, job, watcher, hang_timeout_s=options.hang_timeout_s, in_process=options.in_process
            )
            for target in (kernel_job, model_job)
        ]
        kernels, models = (future.result() for future in futures)
    return _joined(kernel, options.seed, kernels, models, time.monotonic() - started), kernels.cases


def kernel_job(job: SelftestJob, emit: Emit) -> Iterator[Part | Refusal]:
    """The kernel check on every kernel mutant, then on honest kernels."""
    import torch

    from pabench.selftest.catalogue import kernel_mutants
    from pabench.selftest.clean import clean_kernel_cases
    from pabench.selftest.kernel_part import kernel_kills

    torch.set_num_threads(1)
    emit(Began("selftest"))
    honest, own = _honest(job)
    part = Part()

    def note(text: str) -> None:
        emit(Note(text))

    for kills in kernel_kills(kernel_mutants(own), honest, job.seed, note):
        name = kills.mutant.name
        part.checks[name] = dict(kills.probes)
        part.rules[name] = dict(kills.rules)
        part.named[name] = kills.named
        part.cases += [r.model_dump(mode="json") for r in kills.records]
    part.clean = [CleanResult(name=c.name, alarm=c.alarm) for c in clean_kernel_cases(honest, job.seed, note)]
    yield part


def model_job(job: SelftestJob, emit: Emit) -> Iterator[Part | Refusal]:
    """The model check on kernel mutants, `localize` on faults of the engine, then both on honest ones."""
    import torch

    from pabench.selftest.catalogue import kernel_mutants
    from pabench.selftest.clean import clean_model_cases
    from pabench.selftest.model_part import References, engine_kills, mutant_kills

    torch.set_num_threads(1)
    emit(Began("selftest"))
    honest, own = _honest(job)
    part = Part()

    def note(text: str) -> None:
        emit(Note(text))

    references = References(job.seed, note)
    try:
        for kills in engine_kills(honest, references, note):
            part.named[kills.name] = kills.named
            _add(part, kills)
        for kills in mutant_kills(kernel_mutants(own), honest, references, note):
            _add(part, kills)
        part.clean = [CleanResult(name=c.name, alarm=c.alarm) for c in clean_model_cases(honest, references, note)]
    finally:
        references.close()
    yield part


def _add(part: Part, kills: Any) -> None:
    from pabench.selftest.model_part import CHECKS

    if kills.killed:
        part.checks[kills.name] = {check: kills.checks.get(check, False) for check in CHECKS}
    elif kills.changed:
        part.checks[kills.name] = dict.fromkeys(CHECKS, False)
    if kills.tokens_equal is not None:
        part.rules[kills.name] = {"32 equal tokens": not kills.tokens_equal}


def _honest(job: SelftestJob) -> tuple[KernelRequest, bool]:
    """What faults are planted in, and whether it is the selftest's own plain kernel."""
    from pabench.selftest.catalogue import plain
    from pabench.selftest.kernel_part import request_of
    from pabench_kernels.request import parse_request

    if job.kernel_text is None:
        return request_of("plain", plain), True
    return parse_request(job.kernel_text), False


def _joined(kernel: str | None, seed: int, kernels: Part, models: Part, duration_s: float) -> SelftestResult:
    from pabench.selftest.catalogue import described

    results = []
    for entry in described(own=kernel is None):
        own = kernels if entry.where == "kernel" else models
        checks = {**kernels.checks.get(entry.name, {}), **models.checks.get(entry.name, {})}
        killed = any(checks.values())
        named = own.named.get(entry.name)
        results.append(
            MutantResult(
                name=entry.name,
                what=entry.what,
                where=entry.where,
                fault=entry.fault,
                mandatory=entry.mandatory,
                killed=killed,
                named=named,
                named_right=killed and named in entry.names,
                checks=checks,
                todays_rules={**kernels.rules.get(entry.name, {}), **models.rules.get(entry.name, {})},
            )
        )
    dead = [m for m in results if m.killed]
    clean = [*kernels.clean, *models.clean]
    alarms = [c for c in clean if c.alarm is not None]
    return SelftestResult(
        kernel=kernel or "plain",
        seed=seed,
        mutants=len(results),
        killed=bound(len(dead), len(results)),
        named_first=bound(sum(m.named_right for m in dead), len(dead)),
        clean=len(clean),
        false_alarms=bound(len(alarms), len(clean)),
        survivors=tuple(m.name for m in results if m.mandatory and not m.killed),
        misnamed=tuple(f"{m.name} as {m.named}" for m in dead if not m.named_right),
        alarms=tuple(f"{c.name}: {c.alarm}" for c in alarms),
        duration_s=round(duration_s, 1),
        matrix=tuple(results),
    )
