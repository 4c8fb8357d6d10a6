"""Progress on stderr while a run works: one bar over the cases, and what is being done right now."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pabench.records import Record

_KERNEL_LINES = 5  # kernel cases come in hundreds: only the first failures get a line
_MARKS = {"PASS": "[green]✓[/]", "NEAR_TIE": "[green]≈[/]", "SKIPPED": "[dim]–[/]", "INCONCLUSIVE": "[yellow]?[/]"}


class RunProgress:
    """A Watcher that draws; what is no terminal gets a line a case. ``quiet`` draws nothing, ``verbose`` tracebacks."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self._kernel_lines = 0
        self.console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int) -> None:
        self._bar.update(self._task, total=total, completed=done, description="starting")

    def note(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def crashed(self, traceback: str) -> None:
        if self.verbose:
            self.console.print(traceback, markup=False, highlight=False)

    def case_done(self, record: Record) -> None:
        self._bar.advance(self._task)
        if record.check == "kernel":
            if record.status in ("PASS", "SKIPPED") or self._kernel_lines == _KERNEL_LINES:
                return
            self._kernel_lines += 1
        mark = _MARKS.get(record.status, "[red]✗[/]")
        kv = "" if record.kv_dtype == record.dtype else f" + {record.kv_dtype} KV"
        took = "" if record.duration_s is None else f" [dim]{record.duration_s:.0f} s[/]"
        subject = record.model if record.check == "model" else f"{record.batch_spec} {record.probe}"
        self.console.print(
            f"{mark} {record.status:<12} {escape(subject or '')} {record.dtype}{kv}  "
            f"{escape(record.kernel or '')}{took}",
            highlight=False,
            soft_wrap=True,
        )
