"""The console that results are printed to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from rich.console import Console


class ResultConsole(Console):
    """stdout, where a reader that goes away (``| head``) does not change the verdict's exit code."""

    def on_broken_pipe(self) -> None:
        """Let the rest of the output go nowhere; rich would exit with 1, which means "judged, and failed"."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What is written to stdout inside the block, by Python or below it (C libraries, subprocesses), goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None and not sys.__stdout__.closed:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)
