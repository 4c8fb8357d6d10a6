"""A plain table of named things."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_listing(rows: Sequence[dict[str, str]], console: Console) -> None:
    """One row each; the first key is the name. Columns are the keys of the first row."""
    if not rows:
        console.print("nothing to list")
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for i, key in enumerate(rows[0]):
        table.add_column(key, no_wrap=i == 0, style="bold" if i == 0 else "")
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))
    console.print(table)
