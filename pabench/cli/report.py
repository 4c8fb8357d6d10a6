"""``pabench report RUN``"""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, a run.json, or a baseline's name.", show_default=False)
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show a stored run; exits 0 whatever its verdict was."""
    from pabench.results import read_run
    from pabench.stored import resolve_run

    header, records = read_run(run)
    if json_:
        import json

        from pabench.records import jsonable

        typer.echo(json.dumps({**jsonable(header), "cases": [jsonable(r) for r in records]}, indent=2))
        return
    from pabench.report.console import ResultConsole
    from pabench.report.table import print_run

    print_run(header, records, ResultConsole(), path=resolve_run(run).parent)
