"""One job in a child process that gives one result: for commands that are no run."""

from __future__ import annotations

from typing import Any

from pabench.errors import CannotJudge, ExecutionError, PabenchError, UsageError
from pabench.runner.events import Crashed, Emit, Escaped, Note, Result, Target
from pabench.runner.options import Watcher
from pabench.runner.worker import Worker, surroundings, wait_for

_KINDS: dict[str, type[PabenchError]] = {k.__name__: k for k in (UsageError, CannotJudge, ExecutionError)}


class Refusal:
    """A ``PabenchError`` of the child, as plain data."""

    def __init__(self, error: PabenchError) -> None:
        self.kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "UsageError")
        self.sentence = str(error)


def run_job(target: Target, job: Any, watcher: Watcher, *, hang_timeout_s: float, in_process: bool = False) -> Any:
    """The first result of ``target(job, emit)``. Raises what the job refuses with, and ``ExecutionError`` where its
    process dies, hangs or raises."""
    if in_process:
        return _unwrapped(next(target(job, _emitter(watcher))))
    worker = Worker(target, job, surroundings(), hang_timeout_s)
    try:
        while not worker.ended:
            wait_for([worker])
            for event in worker.read():
                match event:
                    case Note(text):
                        watcher.note(text)
                    case Crashed(traceback) | Escaped(traceback=traceback):
                        watcher.crashed(traceback)
                        if isinstance(event, Escaped):
                            raise ExecutionError(f"it ended with {_one_line(event.summary)}; -v shows the traceback")
                    case Result(value):
                        return _unwrapped(value)
            if worker.dead or worker.overdue:
                death = worker.death()
                place = worker.place
                where = "" if place is None else f" in layer {place.layer}, {place.phase}"
                raise ExecutionError(f"{death.sentence}{where}")
    finally:
        worker.close()
    raise ExecutionError("the job ended without a result")


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(": ")


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Refusal):
        raise _KINDS[value.kind](value.sentence)
    return value


def _emitter(watcher: Watcher) -> Emit:
    def emit(event: Any) -> None:
        if isinstance(event, Note):
            watcher.note(event.text)

    return emit
