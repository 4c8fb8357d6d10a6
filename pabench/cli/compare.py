"""``pabench compare BASE CANDIDATE``"""

from __future__ import annotations

from typing import Annotated

import typer

_RUN_HELP = "A run folder, a run.json, or a baseline's name."


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help=_RUN_HELP, show_default=False)],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help=_RUN_HELP, show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what got better or worse between two runs, and exit 1 on a regression."""
    from pabench.compare import compare as compare_runs
    from pabench.records import dumps
    from pabench.results import read_run

    comparison = compare_runs(read_run(base), read_run(candidate))
    if json_:
        typer.echo(dumps(comparison, indent=2))
    else:
        from pabench.report.comparison import print_comparison
        from pabench.report.console import ResultConsole

        print_comparison(comparison, ResultConsole())
    raise typer.Exit(comparison.exit_code)
