"""One supervised child process, seen from its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from pabench.runner.child import DUMP_SIGNAL, Surroundings, child_main
from pabench.runner.death import Death, died, hung
from pabench.runner.events import At, Began, Ended, Event, Result, Target

# Read when torch or triton is imported, which the fork server has done already.
_AT_IMPORT = ("TRITON_INTERPRET", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_PRELOAD = ("pabench.runner.kernel_job", "pabench_kernels.torch_paged")
_PRELOAD_TRITON = ("pabench_kernels.triton_decode", "pabench_kernels.triton_prefill")
_PRELOAD_OF = {  # what a check needs beyond; seconds each
    "kernel": ("torch._inductor.config",),  # imported by deterministic mode
    "model": ("pabench.runner.model_judging", "transformers.models.llama.modeling_llama"),
}
_GRACE_S = 5.0  # from the end of a child's pipe to the end of the child
_DUMP_S = 1.0  # what a hanging child gets to say where it is
_DUMP_PAUSE_S = 0.2  # after which it has said all
_DUMP_BYTES = 1 << 16

_server_environ: dict[str, str | None] | None = None  # what the fork server was started with; None: not yet


def surroundings(threads: int | None = None) -> Surroundings:
    """This process's environment, folder and path, for a child."""
    return Surroundings(dict(os.environ), os.getcwd(), list(sys.path), threads)


def start_server(checks: Collection[str] = ()) -> bool:
    """Start the fork server, which imports torch meanwhile and what ``checks`` need; once a process.

    Call it when the environment is as it will be. Returns whether there is one; without one, children import for
    themselves.
    """
    global _server_environ
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return False
    if _server_environ is None:
        from multiprocessing import forkserver

        triton = () if _import_fails("triton") else _PRELOAD_TRITON
        more = [module for check in checks for module in _PRELOAD_OF.get(check, ())]
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *triton, *more])
        try:
            with _without_main(), _path_in_environ():
                forkserver.ensure_running()
        except OSError:  # no folder for its socket
            return False
        _server_environ = _import_environ()
    return _server_environ == _import_environ()


class Worker:
    """A child that runs ``target(job, emit)``. ``open_case`` and ``place`` are where it was last seen."""

    def __init__(self, target: Target, job: Any, around: Surroundings, hang_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self.open_case: str | None = None
        self.place: At | None = None
        self.peak_rss_bytes = 0
        self.ended = False  # all results are in
        self.dead = False  # it will send nothing more, and has not ended
        self._lost = False
        context: Any = multiprocessing.get_context("forkserver" if start_server() else "spawn")
        self.events, events = context.Pipe()
        self._dumps, dumps = context.Pipe(duplex=False)
        life, self._life = context.Pipe(duplex=False)
        self._process = context.Process(
            target=child_main, args=(target, job, around, events, dumps, life), name="pabench-judge"
        )
        try:
            with _without_main():
                self._process.start()
        finally:
            for theirs in (events, dumps, life):
                theirs.close()
        self._heard = time.monotonic()

    def read(self) -> Iterator[Event]:
        """What has come in; afterwards ``ended`` and ``dead`` tell whether more may come."""
        alive = self._process.is_alive()  # asked first: what a dead process has sent is all there
        try:
            while not self.ended and self.events.poll():
                event: Event = self.events.recv()
                self._heard = time.monotonic()
                match event:
                    case Began(case_id):
                        self.open_case, self.place = case_id, None
                    case At():
                        self.place = event
                    case Result(peak_rss_bytes=peak):
                        self.open_case = self.place = None
                        self.peak_rss_bytes = max(self.peak_rss_bytes, peak)
                    case Ended():
                        self.ended = True
                yield event
        except (EOFError, OSError):
            self._process.join(_GRACE_S)
            self._lost = self._process.is_alive()
            alive = False
        self.dead = not alive and not self.ended

    @property
    def channels(self) -> list[Connection | int]:
        """What becomes readable when there is something to do."""
        return [self.events, self._process.sentinel]

    @property
    def seconds_left(self) -> float | None:
        """Until a missing sign of life means that the open case hangs; None where no case is open."""
        return None if self.open_case is None else self._heard + self._hang_timeout_s - time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether the open case hangs. Ask after ``read``."""
        return not self.dead and self.seconds_left is not None and self.seconds_left <= 0

    def death(self) -> Death:
        """How it died; one that hangs is asked where it is, and killed."""
        if self.overdue and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, DUMP_SIGNAL)
            dump = self._dump(_DUMP_S)
            self._kill()
            return hung(self._hang_timeout_s, dump)
        self._kill()
        if self._lost:
            return Death("lost", "the kernel closed the pipe through which its process reports", self._dump())
        return died(self._process.exitcode, self._dump())

    def close(self) -> None:
        """End the child, whatever it does, and free what it held."""
        if self.ended:
            self._process.join(_GRACE_S)
        self._kill()
        for ours in (self.events, self._dumps, self._life):
            ours.close()
        self._process.close()

    def _dump(self, patience_s: float = 0.0) -> str:
        """Python's own report; ``patience_s`` is waited for its beginning."""
        text = b""
        while wait([self._dumps], patience_s) and (part := os.read(self._dumps.fileno(), _DUMP_BYTES)):
            text += part
            patience_s = min(patience_s, _DUMP_PAUSE_S)
        return text.decode(errors="replace")

    def _kill(self) -> None:
        """The child and all that it started."""
        if not self._process.is_alive() or (pid := self._process.pid) is None:
            return
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no group of its own yet
            self._process.kill()
        self._process.join()


def wait_for(workers: Sequence[Worker]) -> None:
    """Until one of them has something to say, has died or is overdue."""
    left = [s for w in workers if (s := w.seconds_left) is not None]
    channels = [c for w in workers for c in w.channels]
    wait(channels, max(0.0, min(left)) if left else None)


def _import_environ() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _AT_IMPORT}


def _import_fails(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is None


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's main script again in the child: nothing of it is needed there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _path_in_environ() -> Iterator[None]:
    """The fork server finds its modules where this process does (Python 3.11's does not take over sys.path)."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p or os.curdir) for p in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
