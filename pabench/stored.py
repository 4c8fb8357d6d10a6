"""Reading stored runs: a run folder, its run.json, a file with both in one (``run --json``), or a baseline's name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pabench.errors import CannotJudge, did_you_mean
from pabench.records import SCHEMA_VERSION, Record, RunHeader

HEADER_FILE = "run.json"
CASES_FILE = "cases.jsonl"
BASELINES = Path("results/baselines")

logger = logging.getLogger(__name__)


def read_run(run: Path | str, *, allow_empty: bool = False) -> tuple[RunHeader, list[Record]]:
    """Header and records of a stored run. A torn last line of cases.jsonl is dropped with a logged warning.

    Raises CannotJudge where the run is missing, empty, damaged, of another schema, or has lost cases.
    """
    path = resolve_run(run)
    header_data = _load_json(path)
    embedded = header_data.pop("cases", None)
    header = _validated_header(header_data, path)
    cases = path.parent / CASES_FILE
    if isinstance(embedded, list):
        records = [_validated_record(c, f"case {i} of '{path}'") for i, c in enumerate(embedded, 1)]
    elif cases.is_file():
        records, _ = parse_cases(cases)
    else:
        records = []
    _check_whole(header, records, path, allow_empty)
    return header, records


def resolve_run(run: Path | str) -> Path:
    """The header file that the user's words mean. Raises CannotJudge where there is none."""
    path = Path(run)
    named = [BASELINES / path, BASELINES / f"{path}.json"] if len(path.parts) == 1 else []
    for candidate in [path, *named, Path("results") / path]:
        if candidate.is_dir() and (candidate / HEADER_FILE).is_file():
            return candidate / HEADER_FILE
        if candidate.is_file():
            return candidate.with_name(HEADER_FILE) if candidate.name == CASES_FILE else candidate
    if path.is_dir():
        raise CannotJudge(f"'{run}' holds no {HEADER_FILE}: it is no run folder, or its run never started")
    baselines = {p.name.removesuffix(".json") for p in BASELINES.glob("[!.]*")} if BASELINES.is_dir() else set()
    hint = f"{did_you_mean(str(run), baselines)}" if baselines else "there are no baselines yet"
    raise CannotJudge(f"no run folder, run.json or baseline named '{run}' ({hint})")


def load_header(path: Path) -> RunHeader:
    data = _load_json(path)
    data.pop("cases", None)
    return _validated_header(data, path)


def parse_cases(path: Path) -> tuple[list[Record], int]:
    """All whole lines of a cases.jsonl and their length in bytes.

    A last line that is cut off (no newline, or no JSON) is dropped with a warning; one in the middle is an error.
    """
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise CannotJudge(f"cannot read '{path}': {e.strerror}") from e
    records: list[Record] = []
    whole = 0
    lines = raw.splitlines(keepends=True)
    for i, line in enumerate(lines, 1):
        last = i == len(lines)
        try:
            data = json.loads(line)
            if last and not line.endswith(b"\n"):
                raise ValueError("no newline")
        except ValueError as e:
            if not last:
                raise CannotJudge(f"line {i} of '{path}' is damaged: run these cases again") from e
            logger.warning("note: the last line of '%s' is cut off and was dropped", path)
            break
        records.append(_validated_record(data, f"line {i} of '{path}'"))
        whole += len(line)
    return records, whole


def _load_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CannotJudge(f"cannot read '{path}': {getattr(e, 'strerror', None) or 'not a text file'}") from e
    if not text.strip():
        raise CannotJudge(f"'{path}' is empty: the run left nothing to judge")
    try:
        data = json.loads(text)
    except ValueError as e:
        raise CannotJudge(f"'{path}' is no JSON, or is cut off") from e
    if not isinstance(data, dict) or "schema_version" not in data:
        raise CannotJudge(f"'{path}' is not a pabench run: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise CannotJudge(
            f"'{path}' has schema_version {data['schema_version']!r}, this pabench reads {SCHEMA_VERSION}: run it again"
        )
    return data


def _validated_header(data: dict[str, Any], path: Path) -> RunHeader:
    try:
        return RunHeader.model_validate(data)
    except ValidationError as e:
        raise CannotJudge(f"'{path}' is not a pabench run: {_first_problem(e)}") from e


def _validated_record(data: Any, where: str) -> Record:
    try:
        return Record.model_validate(data)
    except ValidationError as e:
        raise CannotJudge(f"{where} is not a record: {_first_problem(e)}") from e


def _check_whole(header: RunHeader, records: list[Record], path: Path, allow_empty: bool) -> None:
    seen: set[str] = set()
    for r in records:
        if r.case_id in seen:
            raise CannotJudge(f"'{path.parent}' holds case '{r.case_id}' twice")
        seen.add(r.case_id)
    if header.summary.verdict not in ("running", "interrupted") and header.summary.total != len(records):
        raise CannotJudge(
            f"'{path}' speaks of {header.summary.total} cases but {len(records)} are stored: the run is incomplete"
        )
    if not records and not allow_empty:
        raise CannotJudge(f"'{path}' holds no finished case: there is nothing to judge")


def _first_problem(e: ValidationError) -> str:
    problem = e.errors(include_url=False)[0]
    place = ".".join(str(p) for p in problem["loc"])
    return f"{place + ': ' if place else ''}{problem['msg']}"
