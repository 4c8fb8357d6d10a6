"""``pabench list kernels|models|suites|probes|faults``"""

from __future__ import annotations

from typing import Annotated

import typer

Rows = list[dict[str, str]]


def list_(
    what: Annotated[str, typer.Argument(metavar="kernels|models|suites|probes|faults", show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """List what can be named: kernels, models, suites, probes or faults."""
    from pabench.errors import UsageError, did_you_mean

    sources = {"kernels": _kernels, "models": _models, "suites": _suites, "probes": _probes, "faults": _faults}
    if what not in sources:
        raise UsageError(f"cannot list '{what}': {did_you_mean(what, sources)}")
    rows = sources[what]()
    if json_:
        import json

        typer.echo(json.dumps({what: rows}, indent=2))
        return
    for row in rows:  # a column of its own would leave no room for the others
        if reason := row.pop("reason", ""):
            row["summary"] = f"{row['summary']}. Not here: {reason}"
    from pabench.report.console import ResultConsole
    from pabench.report.listing import print_listing

    print_listing(rows, ResultConsole())


def _kernels() -> Rows:
    from pabench.errors import UsageError
    from pabench_kernels.availability import why_not
    from pabench_kernels.registry import UnknownKernelError, kernel_specs

    try:
        specs = kernel_specs().values()
    except UnknownKernelError as e:
        raise UsageError(str(e)) from e
    rows = []
    for spec in specs:
        reasons = "; ".join(why_not(spec))
        available = {"available": "no" if reasons else "yes", "reason": reasons}
        rows.append({"name": spec.name, "phases": ", ".join(sorted(spec.phases)), **available, "summary": spec.summary})
    return rows


def _models() -> Rows:
    from pabench.models.catalog import BUILT_INS, RANDOM_GEOMETRIES

    return [{"name": m.name, "summary": m.summary} for m in (*BUILT_INS, *RANDOM_GEOMETRIES)]


def _suites() -> Rows:
    from pabench.report.table import shown_path
    from pabench.suite import list_suites

    return [{"name": n, "summary": d, "file": str(shown_path(path))} for n, d, path in list_suites()]


def _probes() -> Rows:
    from pabench.probes import PROBES

    return [{"name": name, "summary": line} for name, line in PROBES.items()]


def _faults() -> Rows:
    from pabench.faults import FAULTS

    return [{"name": name, "summary": line} for name, line in FAULTS.items()]
