"""What a user wrote → a request for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pabench.errors import UsageError
from pabench.planner.config import shape_from_numbers
from pabench.planner.devices_file import read_devices
from pabench.planner.find_model import find_shape
from pabench.planner.plan import PlanRequest
from pabench.planner.pool import Paging
from pabench.planner.providers import here
from pabench.planner.shape import ModelShape, dtype_name

_NEEDED = ("num_layers", "num_kv_heads", "head_dim")


def request_of(
    model: str | None,
    numbers_given: Mapping[str, int | None],
    *,
    devices: str,
    dtype: str | None,
    kv_dtype: str,
    block_size: int,
    scales: str,
    free_behind_window: bool,
    step_tokens: int,
    **rest: Any,
) -> PlanRequest:
    """The request; ``rest`` are fields of ``PlanRequest`` as they are. Raises ``UsageError`` for what is no option."""
    shape = _shape(model, {key: value for key, value in numbers_given.items() if value is not None})
    if dtype is not None:
        shape = replace(shape, dtype=dtype_name(dtype, "--dtype"))
    kv = shape.dtype if kv_dtype == "auto" else dtype_name(kv_dtype, "--kv-dtype")
    return PlanRequest(
        model=shape,
        devices=tuple(here() if devices == "auto" else read_devices(Path(devices))),
        paging=Paging(block_size, kv, scales, free_behind_window, step_tokens),
        **rest,
    )


def _shape(model: str | None, given: dict[str, int]) -> ModelShape:
    for name, value in given.items():
        if value < 1:
            raise UsageError(f"{_option(name)} must be at least 1, got {value}")
    if model is not None:
        max_length = given.pop("max_length", None)
        if given:
            names = ", ".join(_option(name) for name in given)
            raise UsageError(f"-m {model} says what {names} would say again; give one of them")
        shape = find_shape(model)
        return shape if max_length is None else replace(shape, max_length=max_length)
    needed = ("num_layers",) if "latent_dim" in given else _NEEDED
    if missing := [name for name in needed if name not in given]:
        if len(missing) == len(needed):
            raise UsageError("no model was named; give -m, or its shape by --num-layers, --num-kv-heads and --head-dim")
        raise UsageError(f"the shape of a model without -m needs {_option(missing[0])} too")
    return shape_from_numbers(**{"num_kv_heads": 1, "head_dim": 1, **given})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between. Raises ``UsageError`` naming the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} must be whole numbers with commas between, got '{text}'") from error


def split_option(text: str | None) -> tuple[int, ...] | Literal["best"] | None:
    """What ``--layers`` says."""
    if text is None or text == "best":
        return "best" if text else None
    return numbers("--layers", text)
