"""What could not be judged, or crashed, is a result too: one JSON object on stdout under ``--json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pabench.errors import PabenchError

_STATUS = {3: "INCONCLUSIVE", 4: "ERROR"}


@contextmanager
def json_errors(wanted: bool) -> Iterator[None]:
    """Print status and message of a refusal (3) or a crash (4) before it goes on; errors of use stay sentences."""
    try:
        yield
    except PabenchError as error:
        if wanted and error.exit_code in _STATUS:
            typer.echo(json.dumps({"status": _STATUS[error.exit_code], "message": str(error)}, indent=2))
        raise
