"""The name a user gives → the shape of that model. No weights are read and nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from pabench.errors import CannotJudge, UsageError, did_you_mean, exists
from pabench.models import catalog
from pabench.models.cache import cached
from pabench.planner.config import read_config, shape_from_config
from pabench.planner.shape import ModelShape

_RANDOM_VOCAB = 258  # the byte tokenizer's


def find_shape(name: str) -> ModelShape:
    """A built-in name, a config.json, a folder that has one, or a hub id in the local cache.

    Raises ``UsageError`` for what is none of these and ``CannotJudge`` for a model whose config is not here.
    """
    match catalog.find(name):
        case catalog.RandomGeometry() as random:
            return shape_from_config(name, _random_config(random))
        case catalog.BuiltIn() as built_in:
            folder = cached(f"models/{built_in.name}-{built_in.gguf_sha256[:12]}")
            config = folder / "config.json" if folder is not None else _in_hub_cache(built_in.hub_id)
            return _read(name, config)
    path = Path(name).expanduser()
    if exists(path):
        config = path / "config.json" if path.is_dir() else path
        if not config.is_file():
            raise UsageError(f"'{name}' has no config.json; give a model's folder or its config.json")
        recorded = config.resolve().parent.name if config.name == "config.json" else config.stem
        return shape_from_config(recorded, read_config(config))
    if name.count("/") == 1 and not name.startswith((".", "~")) and not name.endswith((".json", ".gguf")):
        return _read(name, _in_hub_cache(name))
    if "/" in name or name.endswith((".json", ".gguf")):
        raise UsageError(f"there is no file or folder '{name}'; check the path, or name a built-in or a hub id")
    raise UsageError(f"unknown model '{name}'; {did_you_mean(name, catalog.model_names())}")


def _read(name: str, config: Path | None) -> ModelShape:
    if config is None:
        raise CannotJudge(
            f"the config of '{name}' is not in the local cache, and planning fetches nothing; "
            "use the model once with `pabench run -m`, or give its config.json"
        )
    return shape_from_config(name, read_config(config))


def _in_hub_cache(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError as error:
        raise UsageError(f"'{hub_id}' is no hub id ({error}); write it as owner/name") from error
    return Path(found) if isinstance(found, str) else None


def _random_config(random: catalog.RandomGeometry) -> dict[str, object]:
    """The config that ``models.random_models`` builds of it."""
    return {
        "model_type": "llama",
        "num_hidden_layers": random.num_layers,
        "num_attention_heads": random.num_q_heads,
        "num_key_value_heads": random.num_kv_heads,
        "head_dim": random.head_dim,
        "hidden_size": random.hidden_size,
        "intermediate_size": random.intermediate_size,
        "max_position_embeddings": random.max_length,
        "vocab_size": _RANDOM_VOCAB,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
