"""Hundreds of kernel cases in a few lines: one row per kernel and dtype, a grid of what failed, the worst cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pabench.batch_spec import longest
from pabench.records import Record, RunHeader
from pabench.report.words import breakable, dtypes, number, short_kernel

MISSED = 0.05  # chance that the bound is too low
_BUCKETS = (0, 1, 16, 64, 128, 256, 512, 1024, 4096, 65000)  # lower ends of the grid's columns
_MIN_FOR_BOUND = 30  # fewer bound nothing worth saying
_MAX_EXAMPLES = 3  # per kernel
_MAX_REASONS = 4
_NAME_WIDTH = 16


def print_kernel_summary(header: RunHeader, records: Sequence[Record], console: Console) -> None:
    """Everything about the kernel cases of a run; never a row per case."""
    asked = list(header.run.config.get("kernel_sources", ()))  # records are stored as they finish
    records = sorted(records, key=lambda r: asked.index(r.kernel) if r.kernel in asked else len(asked))
    console.print(_counts(records))
    console.print()
    console.print(Text(honest_bound(records), style="dim"))
    console.print()
    for kernel in dict.fromkeys(r.kernel for r in records):
        own = [r for r in records if r.kernel == kernel]
        _print_skips(own, console)
        bad = [r for r in own if r.status not in ("PASS", "SKIPPED")]
        if bad:
            _print_failures(header, own, bad, console)


def honest_bound(records: Sequence[Record]) -> str:
    """How many cases were judged and, where none failed, how many can fail at most (Clopper and Pearson, 1934)."""
    judged = [r for r in records if r.status not in ("SKIPPED", "INCONCLUSIVE")]
    wrong = sum(r.status != "PASS" for r in judged)
    text = f"{len(judged):,} kernel case{'s' if len(judged) != 1 else ''} judged, {wrong:,} failed"
    if len(judged) >= _MIN_FOR_BOUND and not wrong:
        bound = 1 - MISSED ** (1 / len(judged))  # the rate at which no failure in n cases has this chance
        text += f": at most {number(100 * bound)} % of such cases fail (95 %, Clopper–Pearson)"
    return text + ". err ÷ tol.: worst row against its tolerance; above 1 is wrong."


def _counts(records: Sequence[Record]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kernel", no_wrap=True)
    table.add_column("dtype / kv", no_wrap=True)
    for name in ("pass", "fail", "error", "skip", "open"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("err ÷\ntol.", justify="right", no_wrap=True)
    for kernel, dtype in dict.fromkeys((r.kernel, dtypes(r)) for r in records):
        own = [r for r in records if r.kernel == kernel and dtypes(r) == dtype]
        n = Counter(r.status for r in own)
        ratios = [r.accuracy.tolerance_ratio for r in own if r.accuracy and r.accuracy.tolerance_ratio is not None]
        table.add_row(
            Text("\n+ ".join(breakable(name, _NAME_WIDTH) for name in short_kernel(kernel).split(" + "))),
            dtype,
            Text(str(n["PASS"]), style="green" if n["PASS"] else "dim"),
            Text(str(n["FAIL"]), style="bold red" if n["FAIL"] else "dim"),
            Text(str(n["ERROR"]), style="bold magenta" if n["ERROR"] else "dim"),
            Text(str(n["SKIPPED"]), style="dim"),
            Text(str(n["INCONCLUSIVE"]), style="yellow" if n["INCONCLUSIVE"] else "dim"),
            number(max(ratios, default=None, key=lambda x: (x != x, x))),
        )
    return table


def _print_skips(own: Sequence[Record], console: Console) -> None:
    reasons = Counter(r.message.removeprefix("unsupported: ") for r in own if r.status == "SKIPPED")
    if not reasons:
        return
    shown = [f"{reason} ({n})" for reason, n in reasons.most_common(_MAX_REASONS)]
    rest = len(reasons) - len(shown)
    text = "; ".join(shown) + (f"; and {rest} more reasons" if rest else "")
    console.print(Text.assemble(("SKIPPED", "dim"), f"  {short_kernel(own[0].kernel)}: {text}"))
    console.print()


def _print_failures(header: RunHeader, own: Sequence[Record], bad: Sequence[Record], console: Console) -> None:
    name = short_kernel(own[0].kernel)
    for d in (d for d in header.diagnoses if d.kernel == own[0].kernel):
        fault = "" if d.fault == "unknown" else f"{d.fault}: "
        condition = f" ({d.condition})" if d.condition else ""
        console.print(Text.assemble(("FAULT", "bold red"), f"  {name}: {fault}{d.summary}{condition}"))
    console.print()
    console.print(Text(f"{name}: block size × longest sequence", style="bold"))
    console.print(_grid(own))
    console.print(Text("failed/judged where something is wrong; · all pass; – only skipped", style="dim"))
    console.print()
    for r in sorted(bad, key=_badness, reverse=True)[:_MAX_EXAMPLES]:
        style = "bold magenta" if r.status == "ERROR" else "bold red"
        console.print(Text.assemble((r.status, style), f"  {name} {dtypes(r)} {r.batch_spec} {r.probe}"))
        console.print(Padding(Text(r.message), (0, 0, 0, 2), expand=False))
        console.print(Text(f"  {r.repro}", style="cyan"), soft_wrap=True)
    if len(bad) > _MAX_EXAMPLES:
        console.print(Text(f"  {len(bad) - _MAX_EXAMPLES} more in the record.", style="dim"))
    console.print()


def _badness(r: Record) -> tuple[bool, float]:
    ratio = None if r.accuracy is None else r.accuracy.tolerance_ratio
    return r.status == "ERROR", 0.0 if ratio is None else ratio


def _grid(own: Sequence[Record]) -> Table:
    """Rows block sizes, columns lengths: the form in which people file bugs."""
    cells: dict[tuple[int, int], list[Record]] = {}
    for r in own:
        length = longest(r.batch_spec)
        if r.block_size is not None and length is not None:
            cells.setdefault((r.block_size, max(b for b in _BUCKETS if b <= length)), []).append(r)
    columns = sorted({bucket for _, bucket in cells})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("block", justify="right", no_wrap=True)
    for bucket in columns:
        name = f"{bucket // 1000}k" if bucket >= 10000 else str(bucket)
        table.add_column(f"{name}–" if bucket != _BUCKETS[-1] else f"{name}…", justify="right", no_wrap=True)
    for block in sorted({b for b, _ in cells}):
        row = [Text(str(block))]
        for bucket in columns:
            there = cells.get((block, bucket), [])
            found = [r for r in there if r.status in ("PASS", "FAIL", "ERROR")]
            wrong = sum(r.status != "PASS" for r in found)
            style = "red" if wrong else "green" if found else "dim"
            mark = f"{wrong}/{len(found)}" if wrong else "·" if found else "–" if there else ""
            row.append(Text(mark, style=style))
        table.add_row(*row)
    return table
