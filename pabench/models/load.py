"""A name becomes a source (nothing read but what identifies it), a source becomes a model in a dtype."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pabench.errors import CannotJudge, UsageError, did_you_mean, exists
from pabench.models import catalog, folder
from pabench.models.fetch import fetch_built_in, fetch_hub_model
from pabench.models.geometry import AttentionGeometry, describe_attention
from pabench.models.gguf_convert import converted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_RECIPE = 1  # raise it when random models of one seed become other models


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. ``name`` is what results record and holds no absolute path."""

    name: str
    path: Path | None  # a folder with config, safetensors and tokenizer
    random: catalog.RandomGeometry | None
    seed: int
    fingerprint: str  # 16 hex digits, the same on every machine


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in eval mode without gradients, and what a run needs to know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    geometry: AttentionGeometry
    fingerprint: str


def resolve_model(name: str, *, offline: bool = False, seed: int = 0) -> ModelSource:
    """Find a model, fetching or converting it if need be: a built-in name, a folder, a GGUF file or a hub id.

    ``seed`` draws the weights of a random built-in. Raises ``UsageError`` for what does not exist or is not a model,
    ``CannotJudge`` for one that cannot be had.
    """
    match catalog.find(name):
        case catalog.RandomGeometry() as random:
            shape = {key: value for key, value in dataclasses.asdict(random).items() if key != "summary"}
            return ModelSource(name, None, random, seed, folder.digest([shape, seed, _RECIPE]))
        case catalog.BuiltIn() as built_in:
            path = fetch_built_in(built_in, offline=offline)
            return ModelSource(name, path, None, seed, folder.fingerprint(path))
    path = Path(name).expanduser()
    if exists(path):
        recorded = path.name if path.name not in ("", "..") else path.resolve().name
        path = _model_folder(path)
        return ModelSource(recorded, path, None, seed, folder.fingerprint(path))
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(".gguf"):
        path = fetch_hub_model(name, offline=offline)
        return ModelSource(name, path, None, seed, folder.fingerprint(path))
    if "/" in name or "\\" in name or name.lower().endswith(".gguf"):
        raise UsageError(f"there is no file or folder '{name}'; check the path, or name a built-in or a hub id")
    raise UsageError(f"unknown model '{name}'; {did_you_mean(name, catalog.model_names())}")


def load_model(
    source: ModelSource, *, dtype: torch.dtype, device: str = "cpu", attn_implementation: str | None = None
) -> LoadedModel:
    """Load ``source`` with its stored weights rounded once to ``dtype``; buffers such as RoPE's stay in fp32.

    ``attn_implementation`` None is sdpa, or eager for a class that has no sdpa (Gemma 2, gpt-oss). Raises
    ``UsageError`` for a damaged folder, ``CannotJudge`` for attention that cannot run paged and a missing device.
    """
    require_device(device)
    if source.random is not None:
        from pabench.models.byte_tokenizer import byte_tokenizer
        from pabench.models.random_models import random_model

        model: PreTrainedModel = random_model(
            source.random, seed=source.seed, attn_implementation=attn_implementation or "sdpa"
        )
        for parameter in model.parameters():  # not model.to(dtype), which would round RoPE's frequencies too
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    else:
        from pabench.models.pretrained import load_pretrained

        assert source.path is not None
        model, tokenizer = load_pretrained(source.path, source.name, dtype, attn_implementation)
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    return LoadedModel(model, tokenizer, source.name, describe_attention(model), source.fingerprint)


def _model_folder(path: Path) -> Path:
    """The folder of safetensors that a user's path stands for; a GGUF file is converted."""
    try:
        return _find_model_folder(path)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror or error}); check its permissions") from error


def _find_model_folder(path: Path) -> Path:
    if path.is_file():
        return converted(path)  # which refuses what is no GGUF
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if ggufs and not folder.weight_files(path):
        if len(ggufs) > 1:
            listed = ", ".join(ggufs[:4]) + (", …" if len(ggufs) > 4 else "")
            raise UsageError(f"'{path}' holds {len(ggufs)} GGUF files ({listed}); name one of them")
        return converted(path / ggufs[0])
    if lacking := folder.missing_files(path):
        raise UsageError(
            f"'{path}' is no model folder: it has no {' and no '.join(lacking)}; "
            "give a folder with config.json, safetensors and a tokenizer, or a GGUF file"
        )
    try:
        json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise UsageError(f"'{path}/config.json' is no JSON ({error}); copy or download the model again") from error
    return path


def require_device(device: str) -> None:
    """Raises ``UsageError`` for what is no device, ``CannotJudge`` for a CUDA device that is not here."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"unknown device '{device}'; use cpu or cuda, or cuda:0, cuda:1, …") from error
    if kind not in ("cpu", "cuda"):
        raise CannotJudge(f"device '{device}' is not supported; use cpu, or cuda (ROCm devices are named cuda too)")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotJudge(f"device '{device}' was asked for, but torch sees no CUDA device here; use --device cpu")
