"""What a judging process tells the process that supervises it. Plain data: it travels over a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Began:
    """A case begins: from here to its result a missing sign of life means that it hangs."""

    case_id: str


@dataclass(frozen=True)
class Note:
    """What is being done, for people."""

    text: str


@dataclass(frozen=True)
class At:
    """A kernel is entered."""

    layer: int
    phase: str


@dataclass(frozen=True)
class Crashed:
    """The traceback of what a case raised."""

    traceback: str


@dataclass(frozen=True)
class Result:
    """One result of the job, and the peak resident memory of the process so far."""

    value: Any
    peak_rss_bytes: int


@dataclass(frozen=True)
class Escaped:
    """The job itself raised ``summary``, where only a bug of ours or a kernel's KeyboardInterrupt can."""

    summary: str
    traceback: str


@dataclass(frozen=True)
class Ended:
    """Nothing more will come; what the process does from here on is of no interest."""


Event = Began | Note | At | Crashed | Result | Escaped | Ended
Emit = Callable[[Event], None]
Target = Callable[[Any, Emit], Iterator[Any]]  # (job, emit) → results; the target is found by its module and name
