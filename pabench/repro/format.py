"""A repro file: one attention call, as safetensors whose metadata holds this JSON. No torch, no pickle.

Tensors: query [T, Hq, D]; key_blocks [N, BS, Hkv, D] and value_blocks [N, BS, Hkv, Dv], the N blocks that the block
table names, in ascending order of their ids; block_table int32 [S, columns]; seq_lens int32 [S]; query_start_loc int32
[S + 1]; and, where the call has them, k_scale, v_scale, alibi_slopes, sinks.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pabench.errors import UsageError

VERSION = 1
METADATA_KEY = "pabench_repro"
MAX_FILE_BYTES = 8 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_POOL_BYTES = 4 << 30  # what a replay may allocate for the pool
TENSORS = ("query", "key_blocks", "value_blocks", "block_table", "seq_lens", "query_start_loc")
OPTIONAL = ("k_scale", "v_scale", "alibi_slopes", "sinks")
_BYTES = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}


class ReproMeta(BaseModel):
    """Version 1. What the tensors do not say."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    kernel: str = Field(max_length=500)  # as recorded
    origin: str = Field(max_length=2000)  # a sentence: where the call was seen
    fault: str = Field(max_length=100)  # what it was called then
    layer: int = Field(ge=0, le=100_000)
    num_blocks: int = Field(ge=1, le=1 << 34)
    scale: float = Field(allow_inf_nan=False)
    causal: bool
    sliding_window: int | None = Field(default=None, ge=1, le=1 << 31)
    logits_soft_cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)


def read_meta(path: Path) -> ReproMeta:
    """Check a file before anything is allocated for it. Raises ``UsageError`` with what is wrong."""
    header = _header(path)
    text = header.pop("__metadata__", {}).get(METADATA_KEY)
    if not isinstance(text, str):
        raise UsageError(f"'{path.name}' is safetensors but no repro file; `pabench localize --repro FILE` writes one")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"repro file '{path.name}': its metadata is not JSON") from error
    if isinstance(data, dict) and (type(data.get("version")) is not int or data["version"] != VERSION):
        raise UsageError(f"repro file '{path.name}' has version {data.get('version')!r}; this pabench reads {VERSION}")
    try:
        meta = ReproMeta.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        raise UsageError(f"repro file '{path.name}': {where}: {problem['msg']}") from error
    _check_shapes(path.name, meta, header)
    return meta


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of its length, then the header, then the data."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UsageError(f"repro file '{path.name}' has {size} bytes; more than {MAX_FILE_BYTES} are never written")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise UsageError(f"'{path.name}' is no safetensors file, or it is cut off")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UsageError(f"repro file '{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path.name}' is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(v, dict) for v in header.values()):
        raise UsageError(f"'{path.name}' is no safetensors file: its header is no table of tensors")
    return header


def _check_shapes(name: str, meta: ReproMeta, header: dict[str, Any]) -> None:
    missing = [t for t in TENSORS if t not in header]
    unknown = [t for t in header if t not in (*TENSORS, *OPTIONAL)]
    if missing or unknown:
        raise UsageError(
            f"repro file '{name}' must hold {', '.join(TENSORS)}"
            + (f"; it lacks {', '.join(missing)}" if missing else f"; it also holds {', '.join(unknown)}")
        )
    shapes: dict[str, list[int]] = {}
    for tensor, entry in header.items():
        shape, dtype = entry.get("shape"), entry.get("dtype")
        if (
            not isinstance(dtype, str)
            or dtype not in _BYTES
            or not isinstance(shape, list)
            or not all(isinstance(n, int) and n >= 0 for n in shape)
        ):
            raise UsageError(f"repro file '{name}': {tensor} has dtype {dtype!r} and shape {shape!r}")
        shapes[tensor] = shape
    ranks = {"query": 3, "key_blocks": 4, "value_blocks": 4, "block_table": 2, "seq_lens": 1, "query_start_loc": 1}
    wrong = next((t for t, rank in ranks.items() if len(shapes[t]) != rank), None)
    if wrong is not None:
        raise UsageError(f"repro file '{name}': {wrong} must have {ranks[wrong]} dimensions, got {shapes[wrong]}")
    key, value, query = shapes["key_blocks"], shapes["value_blocks"], shapes["query"]
    seqs = shapes["seq_lens"][0]
    fits = (
        key[:3] == value[:3]
        and key[3] == query[2]
        and min(key[1:], default=0) > 0
        and query[1] % max(key[2], 1) == 0
        and shapes["block_table"][0] == seqs
        and shapes["query_start_loc"] == [seqs + 1]
        and key[0] <= meta.num_blocks
        and all(shapes[n] == [query[1]] for n in ("alibi_slopes", "sinks") if n in shapes)
        and all(
            shapes[n] in ([], [key[2]], [meta.num_blocks, key[1], key[2]])
            for n in ("k_scale", "v_scale")
            if n in shapes
        )
    )
    if not fits:
        raise UsageError(f"repro file '{name}': its tensors do not belong to one call: {shapes}")
    pool = meta.num_blocks * prod(key[1:]) * _BYTES[header["key_blocks"]["dtype"]]
    if pool > MAX_POOL_BYTES:
        raise UsageError(f"repro file '{name}' needs a pool of {pool} bytes; more than {MAX_POOL_BYTES} are refused")
