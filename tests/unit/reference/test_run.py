import pytest
import torch

from pabench.models.load import load_model, resolve_model
from pabench.reference.quantized import calibrate
from pabench.reference.run import kept_positions, run_reference

PROMPTS = ([5, 9, 200, 31, 40], list(range(40, 77)))


@pytest.fixture(scope="module")
def tiny():
    return load_model(resolve_model("tiny-llama"), dtype=torch.bfloat16)


@pytest.fixture
def run(tiny):
    run = run_reference(tiny, PROMPTS, 8)
    yield run
    run.close()


def test_the_reference_is_transformers_own_greedy_text(tiny, run):
    for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
        ids = torch.tensor([list(prompt)])
        out = tiny.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        assert tuple(out[0, len(prompt) :].tolist()) == tokens
    assert len(run.spool) == len(run.kept[0]) + len(run.kept[1]) + 2 * 7


def test_the_floor_is_measured_both_ways_and_never_zero(run):
    floor = run.floor
    assert set(floor.variants) == {"padded_batch", "padded_batch_eager"}
    assert floor.mean_kld > 0
    assert floor.margin > 0


def test_targets_follow_prompt_and_text(run):
    assert run.target(0, 1) == 200
    assert run.target(0, 4) == run.tokens[0][0]
    assert run.target(0, 6) == run.tokens[0][2]


def test_scales_map_the_largest_key_to_the_dtypes_largest(tiny):
    scales = calibrate(tiny, PROMPTS, torch.float8_e4m3fn)
    seen = []
    for layer in tiny.model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, out: seen.append(float(out.abs().max())))
    tiny.model(torch.tensor([list(PROMPTS[0])]))
    tiny.model(torch.tensor([list(PROMPTS[1])]))
    for layer in tiny.model.model.layers:
        layer.self_attn.v_proj._forward_hooks.clear()
    n = tiny.geometry.num_layers
    for i in range(n):
        assert float(scales.v[i]) * 448 == pytest.approx(max(seen[i], seen[n + i]), rel=1e-6)


def test_a_quantised_reference_differs_from_the_plain_one_and_says_by_how_much(tiny):
    run = run_reference(tiny, PROMPTS, 8, kv_dtype=torch.float8_e5m2)
    run.close()
    assert run.quantization_kld is not None
    assert run.quantization_kld > 0


def test_kept_positions_hold_the_ends_and_are_few():
    assert kept_positions(5) == (0, 1, 2, 3, 4)
    kept = kept_positions(300)
    assert len(kept) == 16
    assert kept[0] == 0
    assert kept[-8:] == tuple(range(292, 300))
