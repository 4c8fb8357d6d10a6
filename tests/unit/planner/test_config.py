"""The planner's view of a config against transformers' own: the cache's shape, and the parameters counted."""

import json
import re

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from pabench.errors import CannotJudge, UsageError
from pabench.models.geometry import describe_attention
from pabench.planner.config import shape_from_config
from pabench.planner.shape import LayerCache

FAMILIES = {
    "Llama": {"num_hidden_layers": 2, "num_key_value_heads": 8},
    "Qwen2": {"num_hidden_layers": 2, "num_key_value_heads": 4},
    "Qwen3": {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 128},
    "Gemma2": {"num_hidden_layers": 2},
    "Gemma3Text": {"num_hidden_layers": 6},
    "Mistral": {"num_hidden_layers": 2, "sliding_window": 128},
    "Mixtral": {"num_hidden_layers": 1},
    "Qwen3Moe": {"num_hidden_layers": 2},
    "Qwen2Moe": {"num_hidden_layers": 2},
    "GptOss": {"num_hidden_layers": 2, "num_local_experts": 8},
    "GPT2": {"n_layer": 2},
    "GPTBigCode": {"n_layer": 2, "n_head": 12},
    "Starcoder2": {"num_hidden_layers": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2},
    "Phi": {"num_hidden_layers": 2},
    "Phi3": {"num_hidden_layers": 2, "pad_token_id": 0},
    "OPT": {"num_hidden_layers": 2},
}


def config_of(family, **changes):
    return getattr(transformers, f"{family}Config")(**changes).get_text_config()


def as_saved(config):
    """What a config.json holds: the JSON of save_pretrained, with its architecture."""
    return json.loads(config.to_json_string())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_of_a_family_has_the_shape_that_the_engine_pages(family):
    config = config_of(family, **FAMILIES[family])
    g, shape = describe_attention(config), shape_from_config(family, as_saved(config))
    assert shape.layers == tuple(LayerCache(g.num_kv_heads, g.head_dim + g.head_dim_v, w) for w in g.sliding_windows)
    assert (shape.num_q_heads, shape.max_length, shape.vocab_size) == (g.num_q_heads, g.max_length, g.vocab_size)


@pytest.mark.parametrize("family", [*FAMILIES, "DeepseekV3"])
def test_the_parameters_are_counted_within_one_percent(family):
    deepseek = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_mtp_layers": 0}
    config = config_of(family, **FAMILIES.get(family, deepseek))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [0] * config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if found := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
            layers[int(found[1])] += parameter.numel()
    shape = shape_from_config(family, as_saved(config))
    weights = shape.weights
    assert weights is not None
    counted = [w.parameters(cache) for w, cache in zip(weights.layers, shape.layers, strict=True)]
    assert counted == pytest.approx(layers, rel=0.01)
    ends = weights.embedding + weights.final + (0 if weights.tied else weights.head)
    assert ends + sum(counted) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)


def test_mla_caches_one_latent_for_all_heads():
    shape = shape_from_config("d", as_saved(config_of("DeepseekV3", num_hidden_layers=2)))
    assert shape.layers == (LayerCache(1, 512 + 64, replicated=True),) * 2


def test_layers_that_are_no_attention_have_no_cache_and_leave_the_weights_unknown():
    config = config_of("Qwen3Next", num_hidden_layers=4)
    shape = shape_from_config("hybrid", as_saved(config))
    assert [bool(layer.kv_heads) for layer in shape.layers] == [k == "full_attention" for k in config.layer_types]
    assert {bool(layer.kv_heads) for layer in shape.layers} == {True, False}
    assert shape.weights is None


def test_layers_that_share_anothers_keys_and_values_have_no_cache():
    config = {**LLAMA, "num_kv_shared_layers": 1}
    assert [layer.kv_heads for layer in shape_from_config("s", config).layers] == [2, 2, 0]


def test_layers_may_differ_in_kv_heads():
    shape = shape_from_config("o", {**LLAMA, "num_key_value_heads": [2, 4, 8]})
    assert [layer.kv_heads for layer in shape.layers] == [2, 4, 8]


def test_falcons_one_kv_head_is_seen():
    config = {"model_type": "falcon", "n_layer": 2, "n_head": 71, "hidden_size": 4544, "multi_query": True}
    assert shape_from_config("falcon", config).layers == (LayerCache(1, 128),) * 2


def test_what_a_multimodal_config_leaves_out_is_the_default_of_its_class():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12}}
    full = transformers.Gemma3Config(text_config=config["text_config"]).get_text_config()
    shape = shape_from_config("g", config)
    assert shape.layers[0] == LayerCache(full.num_key_value_heads, 2 * full.head_dim, full.sliding_window)
    assert [layer.window for layer in shape.layers].count(None) == 2


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_hidden_layers": None, "model_type": "nobody"}, UsageError, "num_hidden_layers, which is missing"),
        ({"num_attention_heads": "8"}, UsageError, 'num_attention_heads, which is "8"'),
        ({"num_hidden_layers": 0}, UsageError, "num_hidden_layers, which is 0"),
        ({"layer_types": ["full_attention"]}, UsageError, "must be a list of 3 kinds"),
        ({"layer_types": ["sliding_attention"] * 3}, UsageError, "has no sliding_window"),
        ({"layer_types": ["telepathy"] * 3}, CannotJudge, "layer 0 of 'c' is a 'telepathy'"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        shape_from_config("c", {k: v for k, v in {**LLAMA, **changes}.items() if v is not None})
