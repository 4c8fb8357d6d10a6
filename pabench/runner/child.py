"""The judging child process: made like its parent, ends with it, and leaves a trace of where it died."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pabench
from pabench.runner.events import Crashed, Emit, Ended, Escaped, Event, Result, Target

DUMP_SIGNAL = signal.SIGUSR1  # "say where you are": the supervisor asks a child that hangs
_OOM_SCORE = "500"  # of the two, the child is the one to be killed for memory


@dataclass(frozen=True)
class Surroundings:
    """What the child takes over from its parent. ``threads`` None leaves torch's number of threads alone."""

    environ: dict[str, str]
    folder: str
    path: list[str]
    threads: int | None = None
    package: str = pabench.__file__


def child_main(
    target: Target, job: Any, around: Surroundings, events: Connection, dumps: Connection, life: Connection
) -> None:
    """Send the events and results of ``target(job, emit)`` through ``events``.

    ``dumps`` takes Python's own report of a fatal signal; ``life`` is closed by the parent's end, however it comes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _end_with(life)
    _isolate(dumps)
    _become(around)
    lock = threading.Lock()  # a kernel may work in several threads

    def emit(event: Event) -> None:
        with lock:
            events.send(event)

    try:
        for value in target(job, emit):
            emit(Result(value, peak_rss_bytes()))
    except BaseException as error:
        emit(Escaped(f"{type(error).__name__}: {error}", traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    emit(Ended())
    os._exit(0)  # no exit handler of a kernel's library may crash or hang a run whose results are in


def emit_crash(error: BaseException, emit: Emit) -> None:
    """Tell what a case raised, with its traceback."""
    emit(Crashed("".join(traceback.format_exception(error))))


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _end_with(life: Connection) -> None:
    """End this process when the other end of ``life`` closes, even while a kernel holds the interpreter's lock."""

    def wait() -> None:
        try:
            life.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=wait, daemon=True, name="pabench-life").start()
    if sys.platform == "linux":  # no thread of Python runs then: let the system kill
        import fcntl

        fcntl.fcntl(life.fileno(), fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life.fileno(), fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life.fileno(), fcntl.F_SETFL, fcntl.fcntl(life.fileno(), fcntl.F_GETFL) | os.O_ASYNC)


def _isolate(dumps: Connection) -> None:
    """Nothing to stdout, own process group, no core files, and a report of where a fatal signal struck."""
    os.dup2(2, 1)  # stdout is for the result
    os.setpgid(0, 0)  # so that what a kernel started ends with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE)
    except OSError:
        pass
    faulthandler.enable(dumps.fileno(), all_threads=False)
    faulthandler.register(DUMP_SIGNAL, dumps.fileno(), all_threads=False)


def _become(around: Surroundings) -> None:
    if around.package != pabench.__file__:
        raise RuntimeError(f"the child process found pabench in {pabench.__file__}, its parent in {around.package}")
    os.environ.clear()
    os.environ.update(around.environ)
    os.chdir(around.folder)
    sys.path[:] = around.path
    if around.threads is not None:
        import torch

        torch.set_num_threads(around.threads)
