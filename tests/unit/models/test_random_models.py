"""Random models are only worth something if a fault in attention shows in their logits: that is measured here."""

from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pabench.models.byte_tokenizer import byte_tokenizer
from pabench.models.catalog import RANDOM_GEOMETRIES, RandomGeometry, find
from pabench.models.random_models import random_model

TEXT = Path(__file__).read_text()[:256]  # real text, longer than a window of blocks


class Probe:
    """sdpa that records the standard deviation of q·k·scale in every layer, and can be wrong in its scale."""

    factor = 1.0

    def __init__(self) -> None:
        self.stds: list[float] = []

    def __call__(self, module, query, key, value, mask, scaling, **kwargs):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ keys.mT * scaling
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        self.stds.append(float(scores[..., visible].std()))
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling * self.factor, **kwargs)


@pytest.fixture
def probe():
    probe = Probe()
    AttentionInterface.register("test_probe", probe)
    AttentionMaskInterface.register("test_probe", sdpa_mask)
    return probe


@pytest.fixture(params=RANDOM_GEOMETRIES, ids=lambda geometry: geometry.name)
def geometry(request) -> RandomGeometry:
    return request.param


@torch.inference_mode()
def logits_of(model, implementation: str) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(torch.tensor([byte_tokenizer()(TEXT).input_ids])).logits[0]


def mean_kld(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0))


def test_attention_is_neither_flat_nor_one_hot_in_any_layer(geometry, probe):
    logits_of(random_model(geometry, seed=0), "test_probe")
    assert len(probe.stds) == geometry.num_layers
    assert all(1.5 <= std <= 4 for std in probe.stds), probe.stds


def test_a_softmax_scale_wrong_by_a_tenth_stands_far_above_fp32_and_bf16_noise(geometry, probe):
    model = random_model(geometry, seed=0)
    reference = logits_of(model, "sdpa")
    probe.factor = 1.1
    fault = mean_kld(reference, logits_of(model, "test_probe"))
    fp32_noise = mean_kld(reference, logits_of(model, "eager"))
    bf16_noise = mean_kld(reference, logits_of(model.to(torch.bfloat16), "sdpa"))
    assert fault > 1e6 * fp32_noise
    assert fault > 10 * bf16_noise


def test_the_next_token_is_neither_certain_nor_a_guess(geometry):
    probabilities = logits_of(random_model(geometry, seed=0), "sdpa").softmax(-1)
    top = float(probabilities.max(-1).values.mean())
    assert 0.05 < top < 0.6
    assert len(probabilities.argmax(-1).unique()) > 30


def test_the_seed_makes_the_weights():
    geometry = find("tiny-llama")
    first, again, other = (random_model(geometry, seed=seed).lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_random_state_is_neither_used_nor_the_models_source():
    torch.manual_seed(0)
    first = random_model(find("tiny-llama"), seed=3).lm_head.weight
    torch.manual_seed(1)
    assert torch.equal(first, random_model(find("tiny-llama"), seed=3).lm_head.weight)


def test_falcon_has_71_query_heads_on_one_kv_head():
    attention = random_model(find("falcon-7b-shape"), seed=0).model.layers[0].self_attn
    assert attention.q_proj.weight.shape[0] == 71 * 64
    assert attention.k_proj.weight.shape[0] == 64
