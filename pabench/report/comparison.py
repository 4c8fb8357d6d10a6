"""The terminal report of a comparison of two runs."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pabench.compare import CasePair, Change, Comparison, Side
from pabench.report.table import STYLES, kernel_cell
from pabench.report.words import breakable, number

_TITLES: dict[Change, tuple[str, str]] = {
    "worse": ("worse", "bold red"),
    "vanished": ("vanished", "bold red"),
    "still_failing": ("still failing", "red"),
    "unjudged": ("no longer judged", "yellow"),
    "better": ("better", "bold green"),
    "appeared": ("appeared", "cyan"),
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Changes worst first, environment differences, notes; the last line is the verdict."""
    for label, side in (("base     ", comparison.base), ("candidate", comparison.candidate)):
        console.print(Text.assemble((f"{label} ", "bold"), _side(side)))
    changed = [c for change in _TITLES for c in comparison.of(change)]
    console.print()
    if changed:
        console.print(_table(changed, console.width))
        console.print()
    for c in changed:
        if c.message and c.candidate not in ("PASS", "NEAR_TIE"):
            console.print(Text.assemble((c.candidate or "", STYLES[c.candidate or "FAIL"]), f"  {c.pair_key}"))
            console.print(Padding(Text(c.message), (0, 0, 0, 2), expand=False))
            console.print()
    if comparison.environment:
        console.print(Text("Environments differ", style="bold yellow"))
        for d in comparison.environment:
            console.print(Padding(Text(f"{d.name}: {d.base} → {d.candidate}"), (0, 0, 0, 2), expand=False))
        console.print()
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    styles = {0: "bold green", 1: "bold red", 4: "bold magenta"}
    console.print(Text(verdict_sentence(comparison), style=styles.get(comparison.exit_code, "bold yellow")))


def verdict_sentence(comparison: Comparison) -> str:
    counts = [f"{len(found)} {_TITLES[c][0]}" for c in _TITLES if (found := comparison.of(c))]
    same = len(comparison.of("unchanged"))
    text = ", ".join([*counts, f"{same} unchanged"])
    regressions = sum(c.regression for c in comparison.cases)
    label = {0: "PASS", 1: "FAIL", 3: "COULD NOT JUDGE", 4: "ERROR"}[comparison.exit_code]
    tail = f"{regressions} {'regression' if regressions == 1 else 'regressions'}" if regressions else "no regression"
    if not regressions and comparison.exit_code == 1:
        tail = "no regression, but the candidate gives wrong answers"
    return f"{label} (exit {comparison.exit_code}): {text}; {tail}."


def _side(side: Side) -> str:
    return f"{side.id} · {side.suite or 'no suite'} · {', '.join(side.kernels) or 'no kernel'} · {side.n_cases} cases"


def _table(cases: list[CasePair], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("change", "kernel", "case", "base →\ncandidate", "KLD ×\nfloor"):
        table.add_column(name, justify="right" if name.startswith("KLD") else "left", no_wrap=True)
    for c in cases:
        title, style = _TITLES[c.change]
        old, new = c.kld_over_floor
        table.add_row(
            Text(title.replace(" ", "\n") if width < 100 else title, style=style),
            kernel_cell(c.candidate_kernel or c.base_kernel, 15),
            Text(_case(c, max(18, width - 60))),
            Text.assemble(
                (f"{c.base or '—'} →\n", STYLES.get(c.base or "", "dim")),
                (c.candidate or "—", STYLES.get(c.candidate or "", "dim")),
            ),
            Text("—" if old is None and new is None else f"{number(old)} → {number(new)}"),
        )
    return table


def _case(c: CasePair, width: int) -> str:
    """The pair key without its check and kernel: model, precision, block size and the digest of the inputs."""
    key = c.pair_key.partition(" kernel=")[0]
    model, *rest = key.removeprefix("model:").split(":")
    lines = [model]
    for word in rest:
        if len(lines) > 1 and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(breakable(line, width) for line in lines)
