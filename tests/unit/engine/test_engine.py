import pytest
import torch

from pabench.engine.attention_hook import PoolCache, attention_implementation
from pabench.engine.block_manager import OutOfBlocksError
from pabench.engine.engine import PagedEngine
from pabench.engine.kv_cache import PagedKVCache
from pabench.errors import CannotJudge
from pabench.models.load import load_model, resolve_model
from pabench_kernels.dispatch import Dispatcher
from pabench_kernels.request import parse_request

PROMPTS = ([5, 9, 200, 31], list(range(40, 77)), [7])


@pytest.fixture(scope="module")
def tiny():
    return load_model(resolve_model("tiny-llama"), dtype=torch.float32)


def engine(loaded, **options):
    return PagedEngine(loaded, Dispatcher(parse_request("torch_paged")), **{"block_size": 4, **options})


def dense_tokens(loaded, prompt, n):
    ids = torch.tensor([prompt])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("token_budget", [7, 256])
def test_generate_gives_the_tokens_of_dense_generate(tiny, token_budget):
    paged = engine(tiny, token_budget=token_budget)
    outputs = paged.generate(PROMPTS, max_new_tokens=12)
    assert outputs == [dense_tokens(tiny, list(p), 12) for p in PROMPTS]
    assert paged.blocks.num_free == paged.blocks.num_blocks


def test_more_prompts_than_the_pool_holds_wait_their_turn(tiny):
    small = engine(tiny, num_blocks=13)  # 37 + 12 tokens need 13 blocks of 4
    assert small.generate(PROMPTS, max_new_tokens=12) == engine(tiny).generate(PROMPTS, max_new_tokens=12)


def test_prefill_insert_decode_free_is_generate(tiny):
    paged = engine(tiny)
    sequences = {}
    for prompt in PROMPTS:
        seq, first = paged.prefill(prompt)
        paged.insert(seq, first)
        sequences[seq] = [first]
    for _ in range(4):
        for seq, token in paged.decode().items():
            sequences[seq].append(token)
    assert list(sequences.values()) == paged.generate(PROMPTS, max_new_tokens=5)
    for seq in sequences:
        paged.free(seq)
    assert paged.decode() == {}
    assert paged.blocks.num_free == paged.blocks.num_blocks


def test_a_stop_token_ends_the_text(tiny):
    (whole,) = engine(tiny).generate([PROMPTS[0]], max_new_tokens=8)
    (stopped,) = engine(tiny).generate([PROMPTS[0]], max_new_tokens=8, stop_tokens=[whole[3]])
    assert stopped == whole[: whole.index(whole[3])]


def test_score_gives_the_log_probabilities_of_dense(tiny):
    text = list(range(60, 95))
    logits = tiny.model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    expected = logits[torch.arange(len(text) - 1), torch.tensor(text[1:])]
    torch.testing.assert_close(engine(tiny, token_budget=8).score(text), expected, atol=1e-4, rtol=0)


def test_a_fork_goes_its_own_way_and_leaves_its_parent_alone(tiny):
    paged = engine(tiny)
    seq, first = paged.prefill(PROMPTS[1])
    child = paged.fork(seq)
    forked = paged.step([(child, [99], [0])])[0]
    kept = paged.step([(seq, [first], [0])])[0]
    alone = engine(tiny)
    again, _ = alone.prefill(PROMPTS[1])
    torch.testing.assert_close(kept, alone.step([(again, [first], [0])])[0], atol=1e-4, rtol=0)
    other = engine(tiny)
    third, _ = other.prefill([*PROMPTS[1]])
    torch.testing.assert_close(forked, other.step([(third, [99], [0])])[0], atol=1e-4, rtol=0)


def test_a_step_that_does_not_fit_writes_nothing(tiny):
    paged = engine(tiny, num_blocks=2)
    seq = paged.add()
    with pytest.raises(OutOfBlocksError, match="needs 3 more blocks of 4 tokens, 2 of 2 are free"):
        paged.step([(seq, [1] * 9, [])])
    assert paged.blocks.num_tokens(seq) == 0


@pytest.mark.parametrize(
    ("tokens", "words"), [(10**6, "exceed the model's length of"), (1500, "exceed the block pool of 256 × 4")]
)
def test_what_can_never_fit_is_refused_with_the_numbers(tiny, tokens, words):
    with pytest.raises(CannotJudge, match=words):
        engine(tiny).add(tokens)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(CannotJudge, match="empty"):
        engine(tiny).prefill([])


def test_unwritten_slots_hold_nan(tiny):
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        pool = PagedKVCache(tiny.geometry, num_blocks=2, block_size=4, dtype=dtype)
        assert bool(pool.keys[0].float().isnan().all())


def test_a_dense_mask_is_refused():
    with pytest.raises(RuntimeError, match="dense mask"):
        PoolCache().get_mask_sizes(4, 0)


def test_a_model_that_ignores_the_implementation_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(tiny.model, "set_attn_implementation", lambda name: None)
    with (
        pytest.raises(CannotJudge, match="ignores attention implementation"),
        attention_implementation(tiny.model, "x"),
    ):
        pass


def test_the_models_own_attention_is_set_back(tiny):
    engine(tiny).generate([PROMPTS[0]], max_new_tokens=2)
    assert tiny.model.config._attn_implementation == "sdpa"
