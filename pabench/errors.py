"""Errors a user can mend: one sentence naming the thing, the value and the remedy. Anything else is a bug."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class PabenchError(Exception):
    """A sentence for the user; ``exit_code`` is the process's (design: 2 usage, 3 could not judge, 4 execution)."""

    exit_code = 2


class UsageError(PabenchError):
    """A flag, name, file or suite key that cannot be used as given."""


class CannotJudge(PabenchError):
    """Something needed for a judgement is missing or unsupported: kernel, model, device, baseline."""

    exit_code = 3


class ExecutionError(PabenchError):
    """A crash, a timeout, or no memory or disk left while running."""

    exit_code = 4


def exists(path: Path) -> bool:
    """Whether the path exists; a name that no file system would take does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """A hint to append to a message: the close matches, or all that is known."""
    names = sorted(known)
    close = get_close_matches(value, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"known: {', '.join(names)}"


def failure_fields(error: BaseException) -> dict[str, str]:
    """status, reason and message of a case that could not be run to its end: what cannot be judged is INCONCLUSIVE,
    anything else an ERROR."""
    if isinstance(error, CannotJudge | UsageError):
        return {"status": "INCONCLUSIVE", "reason": "cannot_judge", "message": str(error)}
    if isinstance(error, PabenchError):
        return {"status": "ERROR", "reason": "execution", "message": str(error)}
    at = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} (at {Path(at.filename).name}:{at.lineno})"
    return {"status": "ERROR", "reason": "crash", "message": message}
