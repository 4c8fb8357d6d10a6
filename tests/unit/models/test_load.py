import dataclasses

import pytest
import torch

from pabench.errors import CannotJudge, UsageError
from pabench.models import folder, load
from pabench.models.gguf_convert import converted
from pabench.models.load import load_model, resolve_model


@pytest.fixture
def model_folder(tmp_path, tiny_gguf):
    """A model folder without a trace of the GGUF it was made of."""
    path = converted(tiny_gguf).rename(tmp_path / "my-model")
    (path / folder.SOURCE_FILE).unlink()
    return path


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mqa", "falcon-7b-shape"])
def test_a_random_built_in(name):
    source = resolve_model(name, offline=True)
    loaded = load_model(source, dtype=torch.float32)
    assert (loaded.name, source.path, source.random.name) == (name, None, name)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.geometry.num_q_heads == source.random.num_q_heads
    assert loaded.geometry.vocab_size == len(loaded.tokenizer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.name = "other"


def test_the_seed_is_part_of_a_random_models_fingerprint():
    assert resolve_model("tiny-llama", seed=1).fingerprint == resolve_model("tiny-llama", seed=1).fingerprint
    assert resolve_model("tiny-llama", seed=1).fingerprint != resolve_model("tiny-llama", seed=2).fingerprint


def test_a_folder_is_recorded_by_its_last_name_only(model_folder, monkeypatch):
    source = resolve_model(str(model_folder))
    assert (source.name, source.path) == ("my-model", model_folder)
    monkeypatch.chdir(model_folder)
    assert resolve_model(".").name == "my-model"


def test_a_gguf_file_is_recorded_by_its_name(tiny_gguf):
    source = resolve_model(str(tiny_gguf))
    assert source.name == "tiny.gguf"
    assert load_model(source, dtype=torch.float32).geometry.num_layers == 1


def test_a_folder_with_one_gguf_is_that_model(tmp_path, tiny_gguf):
    inside = tmp_path / "downloads"
    inside.mkdir()
    tiny_gguf.rename(inside / "tiny.gguf")
    assert resolve_model(str(inside)).name == "downloads"


def test_a_folder_with_two_ggufs_is_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); name one of them"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_recorded_as_it_is(model_folder, monkeypatch):
    monkeypatch.setattr(load, "fetch_hub_model", lambda name, offline: model_folder)
    assert resolve_model("org/some.name-1").name == "org/some.name-1"


def test_a_pretrained_built_in_comes_from_the_fetcher(model_folder, monkeypatch):
    monkeypatch.setattr(load, "fetch_built_in", lambda model, offline: model_folder)
    assert resolve_model("smollm2-135m").name == "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "unknown model 'smolm2-135m'; did you mean 'smollm2-135m'"),
        ("zzz", "unknown model 'zzz'; known: .*tiny-llama"),
        ("./no/such/folder", "no file or folder './no/such/folder'; check the path"),
        ("missing.gguf", "no file or folder 'missing.gguf'; check the path"),
    ],
)
def test_an_unknown_name(name, message):
    with pytest.raises(UsageError, match=message):
        resolve_model(name)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", r"my-model' is no model folder: it has no config.json; give a folder"),
        ("model.safetensors", r"my-model' is no model folder: it has no \*.safetensors; give a folder"),
    ],
)
def test_a_folder_that_lacks_a_file(model_folder, lost, message):
    (model_folder / lost).unlink()
    with pytest.raises(UsageError, match=message):
        resolve_model(str(model_folder))


def test_a_config_that_is_no_json(model_folder):
    (model_folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json' is no JSON .*; copy or download the model again"):
        resolve_model(str(model_folder))


def test_any_other_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"'notes.txt' is not a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "folder"])
def test_another_dtype_is_the_fp32_model_rounded_once(kind, dtype, model_folder):
    source = resolve_model("tiny-llama" if kind == "random" else str(model_folder))
    exact = dict(load_model(source, dtype=torch.float32).model.named_parameters())
    rounded = load_model(source, dtype=dtype).model
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, exact[name].to(dtype)), name
    assert {buffer.dtype for name, buffer in rounded.named_buffers() if "inv_freq" in name} == {torch.float32}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here():
    with pytest.raises(CannotJudge, match=r"device 'cuda' was asked for.*use --device cpu"):
        load_model(resolve_model("tiny-llama"), dtype=torch.float32, device="cuda")


def test_an_unknown_device():
    with pytest.raises(UsageError, match="unknown device 'cudda'; use cpu or cuda"):
        load_model(resolve_model("tiny-llama"), dtype=torch.float32, device="cudda")
