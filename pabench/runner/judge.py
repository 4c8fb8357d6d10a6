"""A plan's cases, judged: in child processes, or all in this one for debuggers."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from typing import Any

from pabench.cases import ModelCase
from pabench.checks.kernel.case import KernelCase
from pabench.checks.kernel.record import kernel_record
from pabench.environment import core_count
from pabench.records import Record
from pabench.runner.events import Crashed, Emit, Event, Note
from pabench.runner.kernel_job import KernelJob, judge_kernel_job
from pabench.runner.lanes import Lane, Supervisor, as_it_is
from pabench.runner.model_job import ModelJob, judge_model_job
from pabench.runner.options import RunOptions, Unwatched, Watcher
from pabench.runner.plan import Plan
from pabench.runner.records import model_record
from pabench.runner.replay import Replayer
from pabench.runner.worker import surroundings
from pabench.suite import Suite

MAX_LANES = 2  # kernels judged side by side: each child holds its own inputs and oracle


class Judging:
    """One record per case of ``plan`` that is not finished yet."""

    def __init__(self, suite: Suite, options: RunOptions, plan: Plan, watcher: Watcher) -> None:
        self.suite = suite
        self.options = options
        self.plan = plan
        self.watcher = watcher
        self._supervisor = Supervisor(watcher, options.hang_timeout_s)

    @property
    def peak_rss_bytes(self) -> int:
        """What the children took at the same time, at most."""
        return self._supervisor.peak_rss_bytes

    def records(self, finished: Collection[str]) -> Generator[Record, None, None]:
        """Kernel cases first, the kernels side by side where there are cores for it; then the model cases."""
        kernels, models = list(self._kernel_lanes(finished)), list(self._model_lanes(finished))
        lanes: list[Lane[Any]] = [*kernels, *models]
        if self.options.in_process:
            emit = _told(self.watcher)
            for lane in lanes:
                if lane.cases:
                    yield from lane.target(lane.job(lane.cases), emit)
            return
        on_cpu = self.options.device == "cpu"
        yield from self._supervisor.run(kernels, min(MAX_LANES, core_count() or 1) if on_cpu else 1)
        yield from self._supervisor.run(models, 1)

    def _kernel_lanes(self, finished: Collection[str]) -> Iterator[Lane[KernelCase]]:
        for request in self.plan.requests:
            own = tuple(c for c in self.plan.kernel_cases if c.kernel == request.name and c.case_id not in finished)
            yield self._kernel_lane(request.text, request.files, own, replay=True)

    def _kernel_lane(
        self, text: str, files: tuple[str, ...], cases: tuple[KernelCase, ...], *, replay: bool
    ) -> Lane[KernelCase]:
        def again(case: KernelCase) -> Record:
            lane = self._kernel_lane(text, files, (case,), replay=False)
            (record,) = Supervisor(Unwatched(), self.options.hang_timeout_s).run([lane], 1)
            return record

        return Lane(
            target=judge_kernel_job,
            cases=cases,
            job=lambda left: KernelJob(text, left, self.options.on_fallback == "fail"),
            record=kernel_record,
            around=surroundings(threads=1),  # the same for one kernel and for two side by side
            files=files,
            settle=Replayer(again) if replay else as_it_is,
        )

    def _model_lanes(self, finished: Collection[str]) -> Iterator[Lane[ModelCase]]:
        cases = tuple(c for c in self.plan.model_cases if c.case_id not in finished)
        if not cases:
            return

        def job(left: tuple[ModelCase, ...]) -> ModelJob:
            plan, options = self.plan, self.options
            return ModelJob(
                self.suite, plan.prompts, plan.sources, left, options.device, options.on_fallback, options.capture
            )

        files = {file for request in self.plan.requests for file in request.files}
        yield Lane(judge_model_job, cases, job, model_record, surroundings(), files)


def _told(watcher: Watcher) -> Emit:
    """What a job tells, where nobody else has to know."""

    def emit(event: Event) -> None:
        match event:
            case Note(text):
                watcher.note(text)
            case Crashed(traceback):
                watcher.crashed(traceback)

    return emit
