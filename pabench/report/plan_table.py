"""The plan on the terminal, made for 80 columns: where the memory goes, what fits, what would help."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pabench.planner.plan import Plan
from pabench.planner.remedies import remedies
from pabench.planner.shape import DTYPE_BYTES
from pabench.planner.split import TIE_BREAK
from pabench.planner.to_json import split_kind
from pabench.planner.words import outcome, size


def print_plan(plan: Plan, console: Console) -> None:
    """Terms, devices, concurrency, remedies; the last line is the outcome."""
    request, model = plan.request, plan.request.model
    facts = [model.name, f"{len(model.layers)} layers", f"{request.paging.kv_dtype} cache"]
    console.print(Text.assemble(("pabench plan ", "bold"), (" · ".join(facts), "dim")))
    for line in _terms(plan):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(_memory(plan))
    console.print()
    console.print(_blocks(plan))
    if split_kind(plan) == "best":
        console.print(Text(f"best split; {TIE_BREAK}", style="dim"))
    console.print()
    for length in request.lengths:
        count = plan.concurrency(length)
        console.print(Text(f"  {count:,} sequence{'' if count == 1 else 's'} of {length:,} tokens at once"))
    for remedy in remedies(plan):
        console.print(Text.assemble(("  would fit with  ", "yellow"), remedy))
    console.print(Text(outcome(plan), style="bold green" if plan.fits else "bold red"))


def _terms(plan: Plan) -> list[str]:
    paging, model = plan.request.paging, plan.request.model
    elements, width = model.elements(), DTYPE_BYTES[paging.kv_dtype]
    scales = paging.scale_bytes(model.layers)
    each = "1 byte" if width == 1 else f"{width} bytes"
    lines = [
        f"a token: {elements:,} elements × {each} = {plan.bytes_per_token:,} bytes in all layers",
        f"a block: {paging.block_size} tokens"
        + (f" + {scales:,} bytes of scales" if scales else "")
        + f" = {plan.block_bytes:,} bytes ({size(plan.block_bytes)})",
    ]
    if plan.cap_blocks is not None:
        lines.append(f"cap ({plan.request.cap}): {plan.cap_blocks:,} blocks, reserved ones included")
    return lines


def _memory(plan: Plan) -> Table:
    table = _table("device", "total", "usable", "used", "weights", "reserve", "= budget")
    for d in plan.devices:
        b = d.budget
        values = (b.total, b.usable, b.used, b.weights, b.activations + b.safety, b.bytes)
        table.add_row(Text(d.device.name, overflow="fold"), *(Text(size(v)) for v in values))
    return table


def _blocks(plan: Plan) -> Table:
    table = _table(
        "device", "layers", "KV\nheads", "window", "block", "blocks\nthat fit", "blocks\nplanned", "stranded"
    )
    request = plan.request
    for d in plan.devices:
        for i, g in enumerate(d.groups):
            planned = g.blocks(plan.num_blocks, request.sequences, request.reserved_blocks)
            first = [f"{d.fits_blocks:,}" if d.fits_blocks is not None else "any"] if i == 0 else [""]
            table.add_row(
                Text(d.device.name if i == 0 else "", overflow="fold"),
                f"{g.num_layers}",
                f"{d.kv_heads}" if i == 0 else "",
                "—" if g.window is None else f"{g.window:,}",
                size(g.block_bytes),
                *first,
                f"{planned:,}",
                size(plan.stranded_bytes(d)) if i == 0 else "",
            )
        if not d.groups:
            table.add_row(Text(d.device.name, overflow="fold"), "0", *["—"] * 5, size(plan.stranded_bytes(d)))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
