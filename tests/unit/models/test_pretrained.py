import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pabench.errors import CannotJudge, UsageError
from pabench.models.gguf_convert import converted
from pabench.models.pretrained import load_pretrained


@pytest.fixture
def path(tiny_gguf):
    return converted(tiny_gguf)


def load(path, attn_implementation=None):
    return load_pretrained(path, "my-model", torch.float32, attn_implementation)


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_whole_folder_loads_in_silence(path, capfd):
    capfd.readouterr()
    model, tokenizer = load(path)
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"
    assert model.config._attn_implementation == "sdpa"
    assert capfd.readouterr() == ("", "")


def test_corrupt_weights(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(
        UsageError, match=r"weights of model 'my-model' are damaged .*; copy or download the model again"
    ):
        load(path)


def test_cut_off_weights(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match="weights of model 'my-model' are damaged"):
        load(path)


def test_a_weight_that_is_missing_is_not_drawn_at_random(path):
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.0.self_attn.o_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UsageError, match=r"'my-model' lacks weights \(1, the first is model.layers.0.self_attn.o_proj.weight\)"
    ):
        load(path)


def test_weights_of_another_shape(path):
    change_config(path, intermediate_size=48)
    with pytest.raises(UsageError, match=r"weight model.layers.0.mlp.\w+.weight of model 'my-model' has not the shape"):
        load(path)


def test_no_tokenizer(path):
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        UsageError, match=r"'my-model' has no usable tokenizer \(no tokenizer file in its folder\); copy or download"
    ):
        load(path)


def test_an_unknown_architecture(path):
    change_config(path, model_type="quux")
    with pytest.raises(
        CannotJudge, match=r"'my-model' has an architecture that this transformers does not know.*quux.*update"
    ):
        load(path)


def test_code_that_comes_with_a_model_is_not_run(path):
    (path / "evil.py").write_text("raise SystemExit('ran')")
    change_config(path, model_type="quux", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(CannotJudge, match="code shipped with a model is never run") as error:
        load(path)
    assert str(path) not in str(error.value)


def test_a_config_of_nonsense(path):
    change_config(path, num_attention_heads="many")
    with pytest.raises(UsageError, match=r"config.json of model 'my-model' cannot be read \(.*\); copy or download"):
        load(path)


def test_what_cannot_be_paged_is_refused_before_its_weights_are_read(path):
    transformers.FalconConfig().save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(CannotJudge, match="architecture 'falcon' cannot be run paged"):
        load(path)


def test_a_model_that_generates_no_text(path):
    transformers.CLIPTextConfig().save_pretrained(path)
    with pytest.raises(CannotJudge, match="'my-model' is a 'clip_text_model', no causal language model; name one"):
        load(path)


@pytest.fixture
def gemma2(path):
    """A class that this transformers runs without sdpa, for its soft cap."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 259, "head_dim": 8}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads))
    if model._supports_sdpa:
        pytest.skip("this transformers runs Gemma 2 with sdpa")
    model.save_pretrained(path)
    return path


def test_a_class_without_sdpa_loads_with_eager(gemma2):
    assert load(gemma2)[0].config._attn_implementation == "eager"


def test_sdpa_asked_for_by_name_does_not_turn_into_eager(gemma2):
    with pytest.raises(
        CannotJudge, match="Gemma2ForCausalLM has no sdpa attention in this transformers; ask for 'eager'"
    ):
        load(gemma2, "sdpa")
