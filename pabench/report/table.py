"""The terminal report of one run. Made for 100 columns, legible at 80; NO_COLOR is honoured by rich."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pabench.records import Record, RunHeader
from pabench.report.kernel_table import print_kernel_summary
from pabench.report.words import (
    breakable,
    divergence_in_words,
    dtypes,
    fallbacks_in_words,
    number,
    subject,
    tokens_in_words,
    verdict_sentence,
)

STYLES = {
    "PASS": "bold green",
    "NEAR_TIE": "green",
    "FAIL": "bold red",
    "DEGENERATE": "bold red",
    "INCONCLUSIVE": "yellow",
    "SKIPPED": "dim",
    "ERROR": "bold magenta",
}
VERDICT_STYLES = {"passed": "bold green", "failed": "bold red", "error": "bold magenta"}
_WIDE = 96
_MAX_DIVERGENCES = 3
_LEGEND = (
    "KLD × floor: divergence of the logits from dense attention, over what dense attention differs from itself by. "
    "attn ÷ tol.: worst attention output against the fp64 oracle, over its tolerance; above 1 is wrong."
)


def print_run(header: RunHeader, records: Sequence[Record], console: Console, *, path: Path | None = None) -> None:
    """Table, first divergences, failures, where the record is, what to do next; the last line is the verdict."""
    _print_heading(header, console)
    for check in dict.fromkeys(r.check for r in records):
        console.print()
        console.print(Text(f"{check} check", style="bold"))
        own = [r for r in records if r.check == check]
        if check == "kernel":
            print_kernel_summary(header, own, console)
        else:
            console.print(_table(own, console.width))
    console.print()
    whole, records = records, [r for r in records if r.check != "kernel"]
    if any(r.logits is not None or r.accuracy is not None for r in records):
        console.print(Text(_LEGEND, style="dim"))
        console.print()
    _print_divergences(records, console)
    _print_troubles(records, console)
    shown = shown_path(path or Path("results") / header.run.id)
    console.print(Text.assemble(("record  ", "bold"), str(shown)), soft_wrap=True)
    for why, command in _next_steps(header, whole, shown):
        console.print(Text.assemble(("next    ", "bold"), why))
        console.print(Text(f"        {command}", style="cyan"), soft_wrap=True)
    console.print()
    style = VERDICT_STYLES.get(header.summary.verdict, "bold yellow")
    console.print(Text(verdict_sentence(header, whole), style=style))


def shown_path(path: Path) -> Path:
    """Relative to the working directory where it lies inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else Path(relative)


def _print_heading(header: RunHeader, console: Console) -> None:
    env = header.environment
    triton = f"triton {env.triton} ({env.triton_mode})" if env.triton else "no triton"
    facts = [header.run.suite or "no suite", f"seed {header.run.seed}", env.device_name or env.device or "cpu"]
    facts += [f"torch {env.torch}", triton]
    console.print(Text.assemble(("pabench ", "bold"), (" · ".join(facts), "dim")))


def _table(records: Sequence[Record], width: int) -> Table:
    wide = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("kernel", "model", "dtype / kv" if wide else "dtype /\nkv", "verdict", *(["proof"] if wide else [])):
        table.add_column(name, no_wrap=True)
    table.add_column("KLD ×\nfloor", justify="right", no_wrap=True)
    table.add_column("attn ÷\ntol.", justify="right", no_wrap=True)
    table.add_column("tokens")
    for r in records:
        verdict, proof = Text(r.status, style=STYLES[r.status]), _proof(r)
        if not wide and proof.plain != "—":
            verdict = Text.assemble(verdict, "\n", proof)
        table.add_row(
            _kernel(r, 16 if wide else 15),
            Text(breakable(r.model or "—", 12)),
            Text(_case(r, 10 if wide else 8)),
            verdict,
            *([proof] if wide else []),
            Text("—" if r.logits is None else f"{number(r.logits.ratio_to_floor)}×"),
            Text(number(_tolerance_ratio(r))),
            Text(tokens_in_words(r.tokens)),
        )
    return table


def kernel_cell(name: str | None, width: int) -> Text:
    """A kernel's name, or the two of a pair, on lines of at most ``width``."""
    first, _, second = (name or "—").removeprefix("prefill=").partition(",decode=")
    text = Text(breakable(first, width))
    if second:
        text.append("\n+ " + breakable(second, width - 2).replace("\n", "\n  "))
    return text


def _kernel(r: Record, width: int) -> Text:
    text = kernel_cell(r.kernel, width)
    if r.execution is not None and r.execution.paired:
        text.append("\n+ " + breakable(r.execution.paired, width - 2).replace("\n", "\n  "), "dim")
    for name in dict.fromkeys(f.to for f in r.execution.fallbacks) if r.execution and r.status != "SKIPPED" else ():
        text.append("\n→ " + breakable(name, width - 2).replace("\n", "\n  "), "red")
    return text


def _case(r: Record, width: int) -> str:
    parts = dtypes(r).replace(" / ", " /\n").split("\n") + [p for p in (r.batch_spec, r.probe) if p]
    return "\n".join(breakable(p, width) for p in parts)


def _proof(r: Record) -> Text:
    if r.execution is None or r.status == "SKIPPED":
        return Text("—")
    styles = {"proved": "green", "claimed": "", "fell_back": "red", "unknown": "yellow"}
    return Text(r.execution.proof.replace("_", " "), style=styles[r.execution.proof])


def _tolerance_ratio(r: Record) -> float | None:
    return None if r.accuracy is None else r.accuracy.tolerance_ratio


def _print_divergences(records: Sequence[Record], console: Console) -> None:
    """Those of failed cases first; where nothing failed, one is shown for orientation."""
    failed = [t for r in records if not r.passed and (t := divergence_in_words(r))]
    passed = [t for r in records if r.passed and (t := divergence_in_words(r))]
    shown = failed[:_MAX_DIVERGENCES] or passed[:1]
    if not shown:
        return
    console.print(Text("First divergence", style="bold"))
    for text in shown:
        console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
    rest = len(failed) + len(passed) - len(shown)
    if rest:
        console.print(Padding(Text(f"{rest} more in the record.", style="dim"), (0, 0, 0, 2), expand=False))
    console.print()


def _print_troubles(records: Sequence[Record], console: Console) -> None:
    for r in records:
        if r.passed and not (r.execution is not None and r.execution.fallbacks):
            continue
        console.print(Text.assemble((r.status, STYLES[r.status]), f"  {subject(r)}"))
        lines = [r.message] if r.message else []
        lines += fallbacks_in_words(r)
        for line in dict.fromkeys(lines):
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        if not r.passed and r.status != "SKIPPED":
            console.print(Text(f"  {r.repro}", style="cyan"), soft_wrap=True)
        console.print()


def localize_command(record: Record) -> str:
    """The command that looks closer at a wrong model case; its options are those of ``pabench run``."""
    return shlex.join(["pabench", "localize", *shlex.split(record.repro or "")[3:]])


def _next_steps(header: RunHeader, records: Sequence[Record], path: Path) -> list[tuple[str, str]]:
    """(why, command) pairs."""
    match header.summary.verdict:
        case "passed":
            return [("see whether a later change makes anything worse:", f"pabench compare {path} <later run>")]
        case "failed" | "error":
            bad = [r for r in records if r.status in ("FAIL", "DEGENERATE", "ERROR")]
            steps = [("run the first bad case alone:", r.repro) for r in bad[:1] if r.repro]
            wrong = [r for r in bad if r.check == "model" and r.status != "ERROR" and r.repro]
            return [*steps, *(("see where and why it is wrong:", localize_command(r)) for r in wrong[:1])]
        case "could_not_judge":
            return [("choose what is supported; the reasons are above:", "pabench list kernels")]
        case "running" | "interrupted":
            return [("go on with the same options and:", "--resume")]
        case _:
            return [("choose a suite:", "pabench list suites")]
