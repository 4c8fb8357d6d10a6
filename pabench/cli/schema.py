"""``pabench schema``"""

from __future__ import annotations

from typing import Annotated

import typer


def schema(
    part: Annotated[
        str,
        typer.Argument(
            metavar="[run|case|json]",
            help="run.json, a line of cases.jsonl, or what --json prints.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Print the JSON Schema of run.json and of a line of cases.jsonl."""
    import json

    from pabench.errors import UsageError, did_you_mean
    from pabench.record_groups import Group
    from pabench.records import Record, RunHeader, RunWithCases

    models: dict[str, type[Group]] = {"run": RunHeader, "case": Record, "json": RunWithCases}
    if part and part not in models:
        raise UsageError(f"unknown part '{part}': {did_you_mean(part, models)}")
    schemas = {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **m.model_json_schema(mode="serialization")}
        for name, m in models.items()
    }
    typer.echo(json.dumps(schemas[part] if part else schemas, indent=2))
