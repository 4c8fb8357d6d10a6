"""A captured attention call of one sequence: NAME.json says what NAME.safetensors holds. No torch.

Tensors: query [T, Hq, D], key [L, Hkv, D], value [L, Hkv, Dv], and sinks or alibi_slopes [Hq] where the model has them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pabench.errors import UsageError

VERSION = 1
MAX_META_BYTES = 1 << 16
MAX_ELEMENTS = 1 << 28  # of all tensors together
_Count = Field(ge=1, le=1 << 24)


class CaptureMeta(BaseModel):
    """Version 1. ``length`` tokens, the last ``query_tokens`` of which are the query."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    model: str = Field(max_length=200)
    layer: int = Field(ge=0, le=100_000)
    phase: Literal["prefill", "decode"]
    dtype: Literal["fp32", "bf16", "fp16"]
    query_tokens: int = _Count
    length: int = _Count
    q_heads: int = _Count
    kv_heads: int = _Count
    head_dim: int = _Count
    head_dim_v: int = _Count
    scale: float = Field(gt=0)
    causal: bool
    window: int | None = Field(default=None, ge=1)
    soft_cap: float | None = Field(default=None, gt=0)
    sinks: bool = False
    alibi: bool = False

    @model_validator(mode="after")
    def _fits(self) -> CaptureMeta:
        if self.query_tokens > self.length:
            raise ValueError(f"query_tokens {self.query_tokens} exceed length {self.length}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are no multiple of {self.kv_heads} KV heads")
        elements = sum(rows * heads * dim for rows, heads, dim in self.shapes().values())
        if elements > MAX_ELEMENTS:
            raise ValueError(f"{elements} elements are more than {MAX_ELEMENTS}")
        return self

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The three big tensors by name."""
        return {
            "query": (self.query_tokens, self.q_heads, self.head_dim),
            "key": (self.length, self.kv_heads, self.head_dim),
            "value": (self.length, self.kv_heads, self.head_dim_v),
        }


def read_meta(path: Path) -> CaptureMeta:
    """Raises ``UsageError`` for what is no capture of a version known here."""
    try:
        if path.stat().st_size > MAX_META_BYTES:
            raise UsageError(f"capture '{path.name}' is larger than {MAX_META_BYTES} bytes: no metadata of a capture")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"capture '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"capture '{path.name}' is not JSON: {error}") from error
    if isinstance(data, dict) and data.get("version") != VERSION:
        raise UsageError(f"capture '{path.name}' has version {data.get('version')!r}; this pabench reads {VERSION}")
    try:
        return CaptureMeta.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        raise UsageError(f"capture '{path.name}': {where}: {problem['msg']}") from error


@cache
def built_in_captures() -> dict[str, Path]:
    """Captures that come with pabench, by name."""
    from pabench.suite import suites_folder

    return {path.stem: path for path in sorted((suites_folder() / "captured").glob("*.json"))}
