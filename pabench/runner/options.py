"""What a run is given besides its suite, what it gives back, and who is told meanwhile. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pabench.records import Record, RunHeader

HANG_TIMEOUT_S = 300.0


class Watcher(Protocol):
    """Is told what happens, for progress display."""

    def begin(self, total: int, done: int) -> None: ...
    def note(self, text: str) -> None: ...
    def crashed(self, traceback: str) -> None: ...
    def case_done(self, record: Record) -> None: ...


class Unwatched:
    """A Watcher that shows nothing."""

    def begin(self, total: int, done: int) -> None: ...
    def note(self, text: str) -> None: ...
    def crashed(self, traceback: str) -> None: ...
    def case_done(self, record: Record) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """What a run needs besides its suite."""

    argv: tuple[str, ...]
    output: Path
    seed: int = 0
    device: str = "cpu"
    on_fallback: Literal["fail", "warn", "allow"] = "fail"
    offline: bool = False
    prompts_file: str | None = None
    resume: bool = False
    suite_text: str | None = None  # what the user named the suite by, where that is a file
    hang_timeout_s: float = HANG_TIMEOUT_S  # a case without a sign of life for so long is ended
    capture: Path | None = None  # where attention calls of model cases are written to
    in_process: bool = False  # judge in this very process, for debuggers: a kernel that dies takes the run along


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    header: RunHeader
    records: tuple[Record, ...]
