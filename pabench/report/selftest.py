"""The kill matrix for the terminal: fault × check, and beside it what today's rules would have seen. No torch."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pabench.selftest.result import Bound, SelftestResult

PROBE_COLUMNS = ("count", "iid", "two_level", "poison", "needle", "fingerprint", "sink")
MODEL_COLUMNS = ("attention", "logits", "tokens", "dispatch", "contract", "scenario")
_SHORT = {
    "two_level": "2lev",
    "poison": "pois",
    "needle": "need",
    "fingerprint": "fing",
    "attention": "attn",
    "logits": "logit",
    "tokens": "tok",
    "dispatch": "disp",
    "contract": "contr",
    "scenario": "scen",
    "atol=rtol=1e-2": "1e-2",
    "5 % outliers": "5 %",
    "cosine > 0.99": "cos",
    "32 equal tokens": "=32",
}


def print_selftest(found: SelftestResult, console: Console) -> None:
    present = {c for m in found.matrix for c in m.checks}
    rules = list(dict.fromkeys(r for m in found.matrix for r in m.todays_rules))
    groups = (
        (
            "kernel check",
            [c for c in PROBE_COLUMNS if c in present] + sorted(present - {*PROBE_COLUMNS, *MODEL_COLUMNS}),
        ),
        ("model check", [c for c in MODEL_COLUMNS if c in present]),
    )
    console.print(
        f"[bold]pabench selftest[/] faults planted in {escape(found.kernel)} · seed {found.seed}\n", highlight=False
    )
    for title, columns in groups:
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0)
        )
        table.add_column("planted fault", no_wrap=True)
        for c in columns:
            table.add_column(_SHORT.get(c, c), justify="center")
        for r in rules:
            table.add_column(f"[dim]{_SHORT.get(r, r)}[/]", justify="center")
        table.add_column("named")
        for m in found.matrix:
            own = [c for c in columns if c in m.checks]
            if not own:
                continue
            marks = [_mark(m.checks.get(c)) for c in columns]
            others = [f"[dim]{_mark(m.todays_rules.get(r))}[/]" for r in rules]
            right = (title == "kernel check") == (m.where == "kernel")
            name = "" if not right else f"[green]{m.named}[/]" if m.named_right else f"[red]{m.named}[/]"
            table.add_row(escape(m.name), *marks, *others, name)
        if table.row_count:
            console.print(table)
            console.print()
    console.print("● seen  ○ not seen, though it changed the answer  blank: nothing to see there", highlight=False)
    if rules:
        names = ", ".join(f"{_SHORT.get(r, r)} = {r}" for r in rules)
        console.print(f"[dim]grey: what rules in use today would have seen ({escape(names)})[/]", highlight=False)
    console.print()
    for label, bound in (
        ("killed", found.killed),
        ("named right first", found.named_first),
        ("false alarms", found.false_alarms),
    ):
        console.print(f"  {label:18} {_share(bound)}", highlight=False, markup=False)
    for rule in rules:
        asked = [m for m in found.matrix if rule in m.todays_rules and m.killed]
        seen = sum(m.todays_rules[rule] for m in asked)
        console.print(
            f"  {rule:18} sees {seen} of {len(asked)} of these faults", highlight=False, markup=False, style="dim"
        )
    if found.misnamed:
        console.print(f"  misnamed           {', '.join(found.misnamed)}", highlight=False, markup=False)
    verdict = (
        "PASS (exit 0): these checks see what they must, and blame nothing honest."
        if found.gating
        else f"NOT GATING (exit 1): {'; '.join(found.shortcomings)}."
    )
    console.print(f"\n{verdict}", highlight=False, markup=False)


def _mark(seen: bool | None) -> str:
    return "" if seen is None else "●" if seen else "○"


def _share(b: Bound) -> str:
    if not b.of:
        return "none"
    return f"{b.count} of {b.of} (95 %: {100 * b.low:.2g} to {100 * b.high:.3g} %, Clopper–Pearson)"
