"""Progress of ``pabench compile`` on stderr: one bar, and a line for what the kernel and the compiler disagree on."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pabench.report.compile_table import subject

if TYPE_CHECKING:
    from pabench.compilation.outcome import CompileOutcome


class CompileProgress:
    """A CompileWatcher that draws. ``quiet`` draws nothing, ``verbose`` a line a case and the compiler's own words."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._verbose = verbose
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> CompileProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def begin(self, total: int) -> None:
        self._bar.update(self._task, total=total, description="compiling")
        if not self._console.is_terminal:
            self._console.print(f"compiling {total} specialisations")

    def case_done(self, outcome: CompileOutcome) -> None:
        self._bar.advance(self._task)
        what = subject(outcome.as_json())
        self.note(what)
        if outcome.status != "PASS" or self._verbose:
            mark = "[green]✓[/]" if outcome.status == "PASS" else "[red]✗[/]"
            took = f"[dim]{outcome.duration_s:.1f} s[/]"
            self._console.print(f"{mark} {escape(what)}  {took}", highlight=False, soft_wrap=True)
        if self._verbose and outcome.log.strip():
            self._console.print(outcome.log.rstrip(), markup=False, highlight=False, soft_wrap=True)
