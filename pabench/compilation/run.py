"""``pabench compile``: kernels found, cases planned, compiled in children, outcomes in the order planned. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from pabench.compilation.cases import chosen_head_dims, chosen_precisions, chosen_targets, plan_cases
from pabench.compilation.outcome import CompileOutcome, summary
from pabench.compilation.pool import Worker, WorkerDiedError, compile_cases, workers
from pabench.compilation.writers import WRITERS
from pabench.environment import core_count, installed
from pabench.errors import CannotJudge, ExecutionError, UsageError
from pabench_kernels.registry import UnknownKernelError, kernel_names


class CompileWatcher(Protocol):
    """Is told how far it is."""

    def note(self, text: str) -> None: ...
    def begin(self, total: int) -> None: ...
    def case_done(self, outcome: CompileOutcome) -> None: ...


@dataclass(frozen=True)
class CompileOptions:
    """As on the command line; None: the default."""

    kernels: Sequence[str] | None = None
    targets: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None
    head_dims: Sequence[str] | None = None
    full: bool = False
    jobs: int | None = None


@dataclass(frozen=True)
class CompileReport:
    """All outcomes, in the order planned, and what was left out."""

    outcomes: tuple[CompileOutcome, ...]
    not_triton: tuple[str, ...]  # registered kernels that launch no Triton function here
    combinations: int  # in the full product

    @property
    def exit_code(self) -> int:
        return int(summary(self.outcomes)["exit_code"])

    def as_json(self) -> dict[str, Any]:
        return {
            "triton": installed("triton"),
            "combinations": self.combinations,
            "not_triton": list(self.not_triton),
            "summary": summary(self.outcomes),
            "cases": [o.as_json() for o in self.outcomes],
        }


def compile_kernels(options: CompileOptions, watcher: CompileWatcher) -> CompileReport:
    """Compile and judge. Raises ``UsageError`` for a name nobody knows and ``CannotJudge`` where nothing can be
    compiled."""
    targets = chosen_targets(options.targets)
    chosen = (targets, chosen_precisions(options.dtypes), chosen_head_dims(options.head_dims))
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}")
    if find_spec("triton") is None:
        raise CannotJudge("triton is not installed, so nothing can be compiled; install it (Linux only)")
    try:
        names = tuple(dict.fromkeys(options.kernels or (*kernel_names(), *WRITERS)))
    except UnknownKernelError as error:
        raise UsageError(str(error)) from error
    watcher.note("looking for Triton functions")
    with workers() as pool:
        pool.grow(1)
        found = {name: _described(pool.workers[0], name, asked=bool(options.kernels)) for name in names}
        phases_of = {name: d["phases"] for name, d in found.items() if d["triton"]}
        others = tuple(name for name in names if name not in phases_of)
        if others and (options.kernels or not phases_of):
            raise CannotJudge(
                f"kernel '{others[0]}' has nothing to compile: it has and launches no @triton.jit function; "
                "name a Triton kernel with -k"
            )
        cases = plan_cases(phases_of, *chosen, full=options.full)
        product = len(plan_cases(phases_of, *chosen, full=True))
        jobs = min(options.jobs or core_count() or os.cpu_count() or 1, len(cases))
        watcher.begin(len(cases))
        pool.grow(jobs)
        outcomes = {}
        for outcome in compile_cases(cases, pool):
            outcomes[outcome.case] = outcome
            watcher.case_done(outcome)
    return CompileReport(tuple(outcomes[c] for c in cases), others, product)


def _described(worker: Worker, name: str, *, asked: bool) -> dict[str, Any]:
    """Phases, and whether it is a Triton kernel: not one that nobody asked for and whose library is not installed."""
    try:
        answer = worker.ask({"op": "describe", "kernel": name})
    except WorkerDiedError as error:
        raise ExecutionError(f"kernel '{name}' cannot be loaded: {error}; {worker.log().strip()[-500:]}") from error
    if "unknown" in answer and asked:
        raise UsageError(answer["unknown"])
    return {"triton": False, **answer}
