import pytest
import transformers
from transformers import AutoModelForCausalLM

from pabench.errors import CannotJudge
from pabench.models.geometry import AttentionGeometry, describe_attention

SMALL = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 100}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GQA = SMALL | {"num_key_value_heads": 2}
N = None


def geometry(**changes):
    plain = {"num_layers": 3, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8}
    plain |= {"sliding_windows": (N, N, N), "soft_cap": None, "has_sinks": False, "max_length": 256, "vocab_size": 100}
    return AttentionGeometry(**(plain | changes))


GPT2 = {"n_layer": 3, "n_head": 8, "n_embd": 64, "n_positions": 256, "vocab_size": 100}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
W = {"sliding_windows": (32, N, 32)}


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("Llama", GQA, {}),
        (
            "Llama",
            GQA | {"num_key_value_heads": 1, "head_dim": 64},
            {"num_kv_heads": 1, "head_dim": 64, "head_dim_v": 64},
        ),
        ("Mistral", GQA | {"sliding_window": 32}, {"sliding_windows": (32, 32, 32)}),
        ("Mistral", GQA | {"sliding_window": None}, {}),
        ("Qwen2", GQA | {"sliding_window": 32, "use_sliding_window": False}, {}),
        (
            "Qwen2",
            GQA | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_windows": (N, 32, 32)},
        ),
        ("Qwen3", GQA | {"head_dim": 16}, {"head_dim": 16, "head_dim_v": 16}),
        (
            "Gemma2",
            GQA | {"head_dim": 16, "sliding_window": 32, "layer_types": KINDS, "attn_logit_softcapping": 50.0},
            {"head_dim": 16, "head_dim_v": 16, "soft_cap": 50.0} | W,
        ),
        ("Gemma3Text", GQA | {"head_dim": 8, "sliding_window": 32, "layer_types": KINDS}, W),
        ("GptOss", GQA | {"head_dim": 8, "sliding_window": 32, "layer_types": KINDS}, {"has_sinks": True} | W),
        ("Phi", GQA, {}),
        ("GPT2", GPT2, {"num_kv_heads": 8}),
        ("GPTBigCode", GPT2 | {"multi_query": True}, {"num_kv_heads": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_family_is_described(family, config, expected):
    if "n_embd" not in config:
        config = config | {"max_position_embeddings": 256}
    assert describe_attention(getattr(transformers, f"{family}Config")(**config)) == geometry(**expected)


def test_the_text_part_of_a_multimodal_config_is_described():
    text = GQA | {"head_dim": 8, "max_position_embeddings": 256, "sliding_window": 32, "layer_types": KINDS}
    assert describe_attention(transformers.Gemma3Config(text_config=text)) == geometry(**W)


def test_a_model_is_described_like_its_config():
    config = transformers.LlamaConfig(**GQA, intermediate_size=8)
    assert describe_attention(AutoModelForCausalLM.from_config(config)) == describe_attention(config)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Falcon", "bypasses AttentionInterface"),
        ("Bloom", "bypasses AttentionInterface"),
        ("Mpt", "bypasses AttentionInterface"),
        ("GPTNeo", "bypasses AttentionInterface"),
        ("DeepseekV3", "MLA"),
        ("Lfm2", "convolutions"),
        ("Jamba", "no causal attention"),
        ("Mamba", "no causal attention"),
        ("Llama4Text", "chunked_attention"),
        ("Gemma3nText", "share another layer's"),
        ("T5", "cross-attention"),
        ("Mllama", "cross-attention"),
        ("Bert", "bidirectional"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name_and_reason(family, reason):
    config = getattr(transformers, f"{family}Config")()
    name = config.get_text_config().model_type
    with pytest.raises(
        CannotJudge, match=rf"architecture '{name}' cannot be run paged: .*{reason}.*; use a model"
    ) as error:
        describe_attention(config)
    assert error.value.exit_code == 3


def test_a_model_that_never_asks_the_attention_interface_is_refused_whatever_its_name():
    model = AutoModelForCausalLM.from_config(
        transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=300)
    )
    model.config.model_type = "renamed"
    with pytest.raises(CannotJudge, match=r"'renamed' cannot be run paged: .*bypasses AttentionInterface"):
        describe_attention(model)
