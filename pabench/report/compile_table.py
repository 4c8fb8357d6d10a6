"""What the compiler made of the kernels: a line per binary, then whatever is not as the kernel says. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pabench.report.words import breakable

_STYLES = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold magenta", "INCONCLUSIVE": "yellow"}
_WORDS = {"PASS": "ok", "INCONCLUSIVE": "open"}
_KIB = 1024
_NAME_WIDTH = 9


def print_compiled(report: Mapping[str, Any], console: Console) -> None:
    """``report`` is what ``--json`` prints."""
    cases: Sequence[Mapping[str, Any]] = report["cases"]
    for kernel in dict.fromkeys(c["kernel"] for c in cases):
        console.print(Text(f"{kernel} · triton {report['triton']}", style="bold"))
        console.print(_table([c for c in cases if c["kernel"] == kernel]))
        console.print()
    console.print(
        Text(
            "feat. all: every feature the kernel supports, 71 query heads a KV head. regs, spill: registers and bytes "
            "of local memory of a thread; shared: KiB of a block. Dashes and ok: refused "
            "by unsupported() and by the compiler, as it should be.",
            style="dim",
        )
    )
    if report["not_triton"]:
        console.print(Text(f"Not Triton, so not compiled: {', '.join(report['not_triton'])}.", style="dim"))
    console.print()
    for c in cases:
        if c["status"] != "PASS":
            console.print(Text.assemble((c["status"], _STYLES[c["status"]]), f"  {subject(c)}: {c['message']}"))
            console.print(Text(f"  {c['repro']}", style="cyan"), soft_wrap=True)
    console.print(Text(verdict_sentence(report)))


def subject(case: Mapping[str, Any]) -> str:
    """ "triton_decode decode on sm_80, bf16 / int8, head_dim 80, plain"."""
    place = f"{case['kernel']} {case['phase']} on {case['target']}"
    return f"{place}, {_dtypes(case)}, head_dim {case['head_dim']}, {case['variant']}"


def verdict_sentence(report: Mapping[str, Any]) -> str:
    """Verdict, exit code and what they rest on."""
    s, n = report["summary"], len(report["cases"])
    refused = sum(c["status"] == "PASS" and not c["declared"]["accepts"] for c in report["cases"])
    match s["verdict"]:
        case "passed":
            also = f", {refused} of them a refusal" if refused else ""
            text = f"PASS (exit 0): compiler and kernel agree in {n} of {n} specialisations{also}"
        case "failed":
            text = f"FAIL (exit 1): compiler and kernel disagree in {s['failed']} of {n} specialisations"
        case "error":
            text = f"ERROR (exit 4): the compiler crashed in {s['errors']} of {n} specialisations"
        case _:
            text = f"COULD NOT JUDGE (exit {s['exit_code']}): {s['inconclusive']} of {n} specialisations stay open"
    if n < report["combinations"]:
        text += f"; any two of their values met, of {report['combinations']} combinations (all: --full)"
    return text + "."


def _dtypes(case: Mapping[str, Any]) -> str:
    return case["dtype"] if case["kv_dtype"] == case["dtype"] else f"{case['dtype']} / {case['kv_dtype']}"


def _table(cases: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("target", "dtype / kv", "dim", "feat.", "function"):
        table.add_column(name, no_wrap=True, justify="right" if name == "dim" else "left")
    for name in ("warps", "regs", "spill", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for c in sorted(cases, key=lambda c: (c["target"], c["phase"], _dtypes(c), c["head_dim"])):
        status = Text(_WORDS.get(c["status"], c["status"]), style=_STYLES[c["status"]])
        place = [c["target"], _dtypes(c), str(c["head_dim"]), "all" if c["variant"] == "features" else "—"]
        if not c["binaries"]:
            table.add_row(*place, c["phase"], "—", "—", "—", "—", status)
        for b in c["binaries"]:
            shared = f"{b['shared_bytes'] / _KIB:.1f}"
            numbers = [str(b["num_warps"]), _shown(b["registers"]), _shown(b["spill_bytes"]), shared]
            function = breakable(b["function"].removesuffix("_kernel"), _NAME_WIDTH)
            table.add_row(*place, function, *numbers, status)
    return table


def _shown(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
