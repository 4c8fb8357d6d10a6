"""An examination of the machine, for the terminal. No torch."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pabench.doctor import Examination, KernelFinding

_MARKS = {"ok": ("✓", "green"), "note": ("–", "yellow"), "bad": ("✗", "bold red")}


def print_examination(found: Examination, console: Console) -> None:
    """Findings by group, the kernels, what cannot be shown, and one last sentence."""
    console.print(Text.assemble(("pabench doctor", "bold"), (f" · device {found.device}", "dim")))
    for group in dict.fromkeys(f.group for f in found.findings):
        console.print()
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, min_width=14)
        table.add_column(overflow="fold")
        for f in (f for f in found.findings if f.group == group):
            table.add_row(Text(*_MARKS[f.state]), f.name, Text(f.text))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text("kernels, each tried on a small batch", style="bold"))
    console.print(Padding(_kernels(found.kernels), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text("what this mode cannot show", style="bold"))
    for line in found.cannot_show:
        table = Table.grid(padding=(0, 1))
        table.add_row("  ·", Text(line))
        console.print(table)
    console.print()
    console.print(_last_line(found))


def _kernels(kernels: tuple[KernelFinding, ...]) -> Table:
    dtypes = list(dict.fromkeys(dtype for k in kernels for dtype in k.results))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kernel", no_wrap=True)
    for dtype in dtypes:
        table.add_column(dtype, justify="center", no_wrap=True)
    table.add_column("why not")
    for k in kernels:
        marks = [_MARKS["ok" if k.results.get(d) == "PASS" else "bad"] for d in dtypes]
        table.add_row(k.name, *(Text(*mark) for mark in marks), Text(k.reason or ""))
    return table


def _last_line(found: Examination) -> Text:
    usable = [k.name for k in found.kernels if k.available]
    if not usable:
        return Text("No kernel can be judged here (exit 3); the reasons are above.", style="bold red")
    how = {"gpu": "on the GPU", "interpreter": "on the CPU, Triton interpreted", "none": "on the CPU, without Triton"}
    more = " --device " + found.device if found.device != "cpu" else ""
    text = f"pabench can judge {', '.join(usable)} {how[found.mode]} (exit 0). Try: pabench run smoke --offline{more}"
    return Text(text, style="bold green")
