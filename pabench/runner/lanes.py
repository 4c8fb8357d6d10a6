"""Cases judged in child processes: what a child tells is passed on, a child that dies costs one case."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pabench.errors import ExecutionError
from pabench.records import Record
from pabench.runner.child import Surroundings
from pabench.runner.death import Death
from pabench.runner.events import At, Crashed, Escaped, Event, Note, Result, Target
from pabench.runner.options import Watcher
from pabench.runner.worker import Worker, wait_for

MAX_HANGS = 2  # of one kernel: each costs the whole time limit, and the next case would most likely hang too


class Case(Protocol):
    @property
    def case_id(self) -> str: ...
    @property
    def kernel(self) -> str: ...


C = TypeVar("C", bound=Case)


def as_it_is(_: Any, record: Record, earlier: int) -> Record:
    """The record; ``earlier`` cases were judged in the same process before."""
    return record


@dataclass(frozen=True)
class Lane(Generic[C]):
    """Cases that share one child process, as long as it lives.

    ``job`` gives the work for those that are left; ``record`` makes a case's record of status, reason and message;
    ``files`` are where its kernels are written; ``settle`` may look at a finished record once
    more; it is told how many cases the child had judged before.
    """

    target: Target
    cases: tuple[C, ...]
    job: Callable[[tuple[C, ...]], Any]
    record: Callable[..., Record]
    around: Surroundings
    files: Collection[str] = ()
    settle: Callable[[C, Record, int], Record] = as_it_is


class Supervisor:
    """Runs lanes side by side. ``peak_rss_bytes`` is what their children took at the same time, at most."""

    def __init__(self, watcher: Watcher, hang_timeout_s: float) -> None:
        self.watcher = watcher
        self.hang_timeout_s = hang_timeout_s
        self.peak_rss_bytes = 0

    def run(self, lanes: Sequence[Lane[Any]], slots: int) -> Iterator[Record]:
        """One record per case, as they finish; ``slots`` lanes at a time."""
        waiting = deque(lane for lane in lanes if lane.cases)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    running.append(_Running(waiting.popleft(), self))
                wait_for([r.worker for r in running])
                for r in running:
                    yield from r.step()
                self.peak_rss_bytes = max(self.peak_rss_bytes, sum(r.worker.peak_rss_bytes for r in running))
                running = [r for r in running if r.left]
        finally:
            for r in running:
                r.worker.close()


class _Running:
    """A lane and its present child."""

    def __init__(self, lane: Lane[Any], supervisor: Supervisor) -> None:
        self.lane = lane
        self.supervisor = supervisor
        self.left = {case.case_id: case for case in lane.cases}
        self.hangs: Counter[str] = Counter()  # by kernel
        self._start()

    def _start(self) -> None:
        job = self.lane.job(tuple(self.left.values()))
        self.worker = Worker(self.lane.target, job, self.lane.around, self.supervisor.hang_timeout_s)
        self.judged = 0  # by this child

    def step(self) -> Iterator[Record]:
        """What the child has told; its successor is started where it has come to an end and cases are left."""
        for event in self.worker.read():
            yield from self._heard(event)
        if self.worker.dead or self.worker.overdue:
            yield from self._mourn(self.worker.death())
        elif not self.worker.ended:
            return
        elif self.left and not self.judged:
            raise ExecutionError(
                f"the judging process ended with {len(self.left)} cases left; this is a bug in pabench"
            )
        self.worker.close()
        if self.left:
            self._start()

    def _heard(self, event: Event) -> Iterator[Record]:
        match event:
            case Note(text):
                self.supervisor.watcher.note(text)
            case Crashed(traceback):
                self.supervisor.watcher.crashed(traceback)
            case Result(record):
                self.judged += 1
                yield self.lane.settle(self.left.pop(record.case_id), record, self.judged - 1)
            case Escaped(summary, traceback) if self.left:
                self.supervisor.watcher.crashed(traceback)
                yield self._error("crash", summary)

    def _mourn(self, death: Death) -> Iterator[Record]:
        """The record of the case that it died in, and of all that are left where there is no use in going on."""
        if not self.left:  # all results are in
            return
        if death.dump:
            self.supervisor.watcher.crashed(death.dump)
        record = self._error(death.reason, death.sentence + self._place() + death.where(self.lane.files))
        yield record
        kernel = record.kernel or ""
        self.hangs[kernel] += death.reason == "hung"
        if self.hangs[kernel] < MAX_HANGS:
            return
        for case in [c for c in self.left.values() if c.kernel == kernel]:
            message = f"not run: {kernel} hung in {MAX_HANGS} earlier cases, each for the whole time limit"
            yield self.lane.record(self.left.pop(case.case_id), status="ERROR", reason="not_run", message=message)

    def _error(self, reason: str, message: str) -> Record:
        """The open case's record, or that of the next one where the child died between two."""
        self.judged += 1
        open_case = self.worker.open_case
        case = self.left.pop(open_case if open_case in self.left else next(iter(self.left)))
        return self.lane.record(case, status="ERROR", reason=reason, message=message)

    def _place(self) -> str:
        match self.worker.place:
            case None:
                return " before the kernel was called" if self.worker.open_case else " before the case began"
            case At(layer, phase):
                return f" in layer {layer}, {phase}"
