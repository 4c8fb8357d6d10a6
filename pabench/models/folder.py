"""What a folder of weights must hold, and its fingerprint. No torch here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

# Written by the saving library, not properties of the model
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "_model_name_or_path"})
_SAMPLES, _SAMPLE_BYTES = 64, 4096
# Left by the GGUF conversion: the SHA-256 of what the folder was made of
SOURCE_FILE = "pabench_source.json"


def weight_files(folder: Path) -> list[str]:
    """The safetensors files a model in ``folder`` is made of, present or not; empty if it has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return ["a readable model.safetensors.index.json"]
    return sorted(file.name for file in folder.glob("*.safetensors"))


def missing_files(folder: Path) -> list[str]:
    """What ``folder`` lacks to be loaded."""
    weights = weight_files(folder)
    lacking = [name for name in ("config.json", *weights) if not (folder / name).is_file()]
    return lacking if weights else [*lacking, "*.safetensors"]


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` has a config, every weights file and a tokenizer."""
    return has_tokenizer(folder) and not missing_files(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has a tokenizer file of a usual name."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def fingerprint(folder: Path) -> str:
    """16 hex digits, the same on every machine: of the GGUF the folder was made of, else of its config and weights.

    Of each weights file the name, the size and 64 evenly spaced samples count, so that another fine-tune of the same
    shape is another model, and gigabytes are not read.
    """
    source = folder / SOURCE_FILE
    if source.is_file():
        return digest(json.loads(source.read_text()))
    config = json.loads((folder / "config.json").read_text())
    files = [[name, (folder / name).stat().st_size, _sampled(folder / name)] for name in weight_files(folder)]
    return digest([{key: config[key] for key in config if key not in _VOLATILE_KEYS}, files])


def digest(value: object) -> str:
    """16 hex digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _sampled(path: Path) -> str:
    size, total = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()
