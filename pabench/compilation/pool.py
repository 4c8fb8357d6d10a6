"""Child processes that compile, one per core, and nothing of them left behind. No torch."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pabench.compilation.cases import CompileCase
from pabench.compilation.outcome import CompileOutcome, crashed, judge

TIMEOUT_S = 300.0  # of one case; the slowest of our own take 20 s
WORKER = "pabench.compilation.worker"


class WorkerDiedError(Exception):
    """The child ended, or was ended, without an answer."""


class Worker:
    """One child in a session of its own, so that Ctrl-C reaches only us, and all it started can be ended with it."""

    def __init__(self, scratch: Path) -> None:
        handle, name = tempfile.mkstemp(suffix=".log", dir=scratch)
        self._log = Path(name)
        self._read = 0
        self._timed_out = False
        with os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(scratch),
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )

    def ask(self, request: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The answer to a request. Raises ``WorkerDiedError`` with the reason."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise WorkerDiedError(f"no answer within {timeout_s:.0f} s" if self._timed_out else self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log(self) -> str:
        """What the child wrote to stderr since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        return new.decode(errors="replace")

    def end(self) -> None:
        """End the child and everything it started, now."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for half_written in _cache().glob(f"*/tmp.pid_{self._process.pid}_*"):
            shutil.rmtree(half_written, ignore_errors=True)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written has nobody to read it
                    pipe.close()

    def _give_up(self) -> None:
        self._timed_out = True
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        return f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def _environment(scratch: Path) -> dict[str, str]:
    """Ours, without the interpreter, with our modules, and with temporary files where we clear up."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env["TMPDIR"] = str(scratch)
    for name, value in (("OMP_NUM_THREADS", "1"), ("TRITON_DEFAULT_FP_FUSION", "1")):  # unset, Triton warns
        env.setdefault(name, value)
    return env


def _cache() -> Path:
    """Triton's cache of compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


class Pool:
    """Children and the folder for what they write."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.workers: list[Worker] = []

    def grow(self, count: int) -> None:
        while len(self.workers) < count:
            self.workers.append(Worker(self._scratch))

    def replace(self, i: int) -> None:
        self.workers[i].end()
        self.workers[i] = Worker(self._scratch)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@contextmanager
def workers() -> Iterator[Pool]:
    """An empty pool, whose children are ended on the way out, however that is."""
    with tempfile.TemporaryDirectory(prefix="pabench-compile-", ignore_cleanup_errors=True) as scratch:
        pool = Pool(Path(scratch))
        try:
            yield pool
        finally:
            pool.end()


def compile_cases(cases: Sequence[CompileCase], pool: Pool) -> Iterator[CompileOutcome]:
    """Outcomes as they come, one thread per child. A child that dies costs one case and is replaced."""
    todo: queue.SimpleQueue[CompileCase] = queue.SimpleQueue()
    done: queue.SimpleQueue[CompileOutcome | BaseException] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    stopped = threading.Event()

    def serve(i: int) -> None:
        try:
            while not stopped.is_set():
                case = todo.get_nowait()
                started = time.monotonic()
                try:
                    answer = pool.workers[i].ask({"op": "compile", "case": asdict(case)})
                    log = pool.workers[i].log()
                    outcome = judge(case, _in_its_words(answer, log), time.monotonic() - started, log)
                except WorkerDiedError as error:
                    if stopped.is_set():
                        return
                    log = pool.workers[i].log()
                    outcome = crashed(case, _last_words(str(error), log), time.monotonic() - started, log)
                    pool.replace(i)
                done.put(outcome)
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(len(pool.workers))]
    for thread in threads:
        thread.start()
    try:
        for _ in cases:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stopped.set()
        pool.end()
        for thread in threads:
            thread.join()


def _in_its_words(answer: dict[str, Any], log: str) -> dict[str, Any]:
    """MLIR raises only "PassManager::run failed"; its reason is what it wrote."""
    refusal = answer["refusal"]
    errors = [line.partition("error:")[2].strip() for line in log.splitlines() if "error:" in line]
    if refusal is None or not errors or "PassManager" not in refusal:
        return answer
    return {**answer, "refusal": f"{refusal}: {errors[0]}"}


def _last_words(how: str, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"{how}: {lines[-1]}" if lines else how
