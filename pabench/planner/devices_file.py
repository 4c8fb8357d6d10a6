"""A devices file: memories that are described instead of measured, so that any machine can be planned for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pabench.errors import UsageError, did_you_mean
from pabench.planner.budget import Device

FIELDS = ("name", "kind", "total_bytes", "used_bytes")


def read_devices(path: Path) -> list[Device]:
    """The devices of a JSON list of ``{name, kind, total_bytes, used_bytes}``; a size may be null or "unknown".

    Raises ``UsageError`` naming the entry and the field for anything else.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the devices file '{path}' cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UsageError(f"the devices file '{path}' is no JSON ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"the devices file '{path}' must hold a list of {{{', '.join(FIELDS)}}}, with at least one")
    devices = [_device(path, i, entry) for i, entry in enumerate(entries)]
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the devices file '{path}' has two devices named '{twice}'; rename one")
    return devices


def _device(path: Path, index: int, entry: Any) -> Device:
    where = f"device {index} of '{path}'"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must be an object with {', '.join(FIELDS)}, got {json.dumps(entry)}")
    if unknown := [key for key in entry if key not in FIELDS]:
        raise UsageError(f"{where} has an unknown field '{unknown[0]}'; {did_you_mean(unknown[0], FIELDS)}")
    if missing := [field for field in FIELDS if field not in entry]:
        raise UsageError(f"{where} has no {missing[0]}; write it, or null where a size is unknown")
    for field in ("name", "kind"):
        if not isinstance(entry[field], str) or not entry[field]:
            raise UsageError(f"{field} of {where} must be a text, got {json.dumps(entry[field])}")
    total, used = (_bytes(where, field, entry[field]) for field in ("total_bytes", "used_bytes"))
    unknown_why = f"'{path}' says so" if total is None or used is None else None
    return Device(entry["name"], entry["kind"].lower(), total, used, unknown_why)


def _bytes(where: str, field: str, value: Any) -> int | None:
    if value is None or value == "unknown":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f'{field} of {where} must be a whole number of bytes or "unknown", got {json.dumps(value)}')
    return value
