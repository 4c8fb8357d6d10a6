"""How a judging process came to its end, in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# What a fatal signal is called: (one word for programs, words for people)
_SIGNALS = {
    signal.SIGSEGV: ("segfault", "segmentation fault"),
    signal.SIGABRT: ("abort", "abort"),
    signal.SIGBUS: ("bus_error", "bus error"),
    signal.SIGILL: ("illegal_instruction", "illegal instruction"),
    signal.SIGFPE: ("arithmetic_exception", "arithmetic exception"),
    signal.SIGKILL: ("out_of_memory", "killed from outside, most likely because memory ran out"),
}
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Death:
    """``reason`` is one word, ``sentence`` says what happened but not where; ``dump`` is Python's own report."""

    reason: str
    sentence: str
    dump: str = ""

    def where(self, files: Collection[str]) -> str:
        """The innermost Python line it happened at, in one of ``files`` if possible: " at k.py:7 in f", or ""."""
        frames = list(_FRAME.finditer(self.dump))
        own = [f for f in frames if f["file"] in files]
        if not frames:
            return ""
        frame = (own or frames)[0]
        return f" at {Path(frame['file']).name}:{frame['line']} in {frame['function']}"


def died(exit_code: int | None, dump: str) -> Death:
    """The death of a process that ended by itself or by a signal; ``exit_code`` as multiprocessing gives it."""
    if exit_code is None or exit_code >= 0:
        return Death("exited", f"the kernel ended its process with exit status {exit_code}", dump)
    try:
        number = signal.Signals(-exit_code)
    except ValueError:  # a real-time signal has no name
        return Death("killed", f"the kernel's process died: signal {-exit_code}", dump)
    reason, words = _SIGNALS.get(number, ("killed", "killed by a signal"))
    return Death(reason, f"the kernel's process died: {number.name} ({words})", dump)


def hung(seconds: float, dump: str) -> Death:
    return Death("hung", f"hung: no sign of life for {seconds:g} s", dump)
