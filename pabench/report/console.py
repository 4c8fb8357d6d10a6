"""The console that results are printed to."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class ResultConsole(Console):
    """stdout, where a reader that goes away (``| head``) does not change the verdict's exit code."""

    def on_broken_pipe(self) -> None:
        """Let the rest of the output go nowhere; rich would exit with 1, which means "judged, and failed"."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
