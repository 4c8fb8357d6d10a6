import json
from pathlib import Path

import pytest

from pabench.models import folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.0"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_whole_folder(model):
    assert folder.is_whole(model)
    assert folder.missing_files(model) == []


@pytest.mark.parametrize(
    ("lost", "named"),
    [("config.json", ["config.json"]), ("model.safetensors", ["*.safetensors"]), ("tokenizer.json", [])],
)
def test_what_is_missing_is_named(model, lost, named):
    (model / lost).unlink()
    assert not folder.is_whole(model)
    assert folder.missing_files(model) == named


def test_a_shard_named_by_the_index_is_missed(model):
    (model / "model.safetensors").rename(model / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder.missing_files(model) == ["b.safetensors"]


def test_an_unreadable_index_is_named(model):
    (model / "model.safetensors.index.json").write_text("{")
    assert folder.missing_files(model) == ["a readable model.safetensors.index.json"]


def test_the_fingerprint_ignores_who_saved_it(model):
    before = folder.fingerprint(model)
    config = {"transformers_version": "6.0", "_name_or_path": "/home/someone", "model_type": "llama"}
    (model / "config.json").write_text(json.dumps(config))
    assert folder.fingerprint(model) == before


def test_the_fingerprint_tells_a_fine_tune_from_its_base(model):
    before = folder.fingerprint(model)
    (model / "model.safetensors").write_bytes(bytes(99_999) + b"\1")
    assert folder.fingerprint(model) != before


def test_a_converted_folder_is_known_by_its_gguf(model):
    (model / folder.SOURCE_FILE).write_text(json.dumps({"gguf_sha256": "a"}))
    before = folder.fingerprint(model)
    (model / "model.safetensors").write_bytes(b"saved by another version")
    assert folder.fingerprint(model) == before
