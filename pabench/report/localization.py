"""A localization and a replay for the terminal. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pabench.localization import LocalizationReport, Place, ReplayReport
from pabench.report.words import number, short_kernel


def print_localization(found: LocalizationReport, console: Console) -> None:
    cache = "" if found.kv_dtype == found.dtype else f" / {found.kv_dtype}"
    console.print(
        f"[bold]pabench localize[/] {escape(short_kernel(found.kernel))} on {escape(found.model)}, "
        f"{found.dtype}{cache}, blocks of {found.block_size}\n",
        highlight=False,
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()

    def row(name: str, text: str) -> None:
        grid.add_row(name, escape(text))

    if found.place is not None:
        row("first wrong", _when(found.place))
        row("where", _where(found.place))
    if found.scenario is not None:
        row("shows", f"only {found.scenario}; the plain run of the case passes")
    if found.causes:
        best, *others = found.causes
        sure = f" ({best.confidence:.0%})" if best.confidence else ""
        row("cause", f"{best.fault}{sure}: {best.clause}")
        if others and others[0].fault != "unknown":
            row("or", f"{others[0].fault} ({others[0].confidence:.0%}): {others[0].clause}")
    if found.condition is not None:
        row("holds", found.condition)
    for i, line in enumerate(found.evidence):
        row("evidence" if i == 0 else "", f"• {line}")
    if found.scenarios:
        ok = [s.what for s in found.scenarios if s.passed]
        if ok:
            row("right", "; ".join(ok))
    if found.repro_note is not None:
        row("replay", f"no file: {found.repro_note}")
    console.print(grid)
    if found.repro is not None:
        console.print(f"\n[bold]replay[/] ({found.repro.bytes / 1000:.1f} kB, the call made small)", highlight=False)
        console.print(f"  {found.repro.command}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{_last_line(found)}", highlight=False, markup=False)


def _last_line(found: LocalizationReport) -> str:
    return {
        "clean": f"CLEAN (exit 0): nothing is wrong; the case is {found.status} and every scenario comes out right.",
        "kernel": "FAULT (exit 1): the kernel is given right inputs and gives a wrong answer.",
        "inputs": "FAULT (exit 1): the kernel is given wrong inputs; look at who prepares them.",
        "elsewhere": "FAULT (exit 1): not in attention; the model itself parts from the dense path.",
        "contract": "FAULT (exit 1): the kernel breaks the contract; its answer was not judged.",
        "dispatch": "FAULT (exit 1): another kernel than the one asked for ran.",
    }[found.verdict]


def _when(p: Place) -> str:
    what = {"prefill": "prefill", "chunk": f"prefill chunk {p.number}", "decode": f"decode step {p.number}"}[p.phase]
    who = "" if p.prompt is None else f" of prompt '{p.prompt}'"
    batch = "alone" if p.batch_size == 1 else f"in a batch of {p.batch_size}"
    return f"{what}{who}, {p.length} tokens in the cache, {batch} (forward pass {p.step})"


def _where(p: Place) -> str:
    text = f"layer {p.layer}, query {_heads(p.q_heads)} (KV {_heads(p.kv_heads)}), position {_some(p.positions)}"
    if p.block is not None:
        physical = "" if p.physical_block is None else f" (physical {p.physical_block})"
        text += f", block {p.block}{physical}"
    if p.slot is not None:
        text += f", slot {p.slot}"
    return f"{text}; off by {number(p.error_over_tolerance)} × what is tolerated"


def _heads(numbers: Sequence[int]) -> str:
    return f"head{'s' * (len(numbers) != 1)} {_some(numbers)}"


def _some(numbers: Sequence[int], limit: int = 8) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:limit]]
    return ", ".join(shown) + (", …" if len(runs) > limit else "")


def _visible(text: str) -> str:
    """On one line; a file from a stranger must not draw on the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_replay(found: ReplayReport, console: Console) -> None:
    console.print(f"[bold]pabench replay[/] {escape(short_kernel(found.kernel))}", highlight=False)
    console.print(f"  call   {found.shape}", highlight=False, markup=False)
    console.print(
        f"  from   {_visible(found.origin)}; it was called {_visible(found.was)} there\n", highlight=False, markup=False
    )
    if found.status == "PASS":
        text = (
            f"PASS (exit 0): all {found.rows} rows (token × head) are right, the worst at "
            f"{number(found.error_over_tolerance)} of its tolerance."
        )
    else:
        clauses = f" ({' or '.join(found.clauses)})" if found.clauses else ""
        text = (
            f"FAIL (exit 1): {found.rows_beyond} of {found.rows} rows are wrong, the worst by "
            f"{number(found.error_over_tolerance)} × its tolerance: {found.fault}{clauses}."
        )
    console.print(text, highlight=False, markup=False)
