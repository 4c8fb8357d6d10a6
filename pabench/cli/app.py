"""The command line: one file per command. Command modules import only typer; the rest inside their functions."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pabench import __version__
from pabench.cli import compare, doctor, plan, report, run, schema
from pabench.cli import compile as compile_
from pabench.cli import list as list_
from pabench.errors import PabenchError


class Group(TyperGroup):
    """Turns a PabenchError into one sentence and its exit code, and Ctrl-C into 130, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PabenchError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(e.exit_code) from e
        except KeyboardInterrupt as e:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from e


def _dashes(token: str) -> str:
    """Options take dashes; ``--kv_dtype`` is understood too."""
    return token.replace("_", "-")


app = typer.Typer(
    name="pabench",
    cls=Group,
    help="Does a paged-attention kernel give the answers of dense attention, and which kernel really ran?",
    epilog="Exit codes: 0 passed · 1 failed · 2 usage · 3 could not judge · 4 crashed · 5 nothing ran",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashes},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pabench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("list")(list_.list_)
app.command("compile")(compile_.compile_)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)
