from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pabench_kernels import PagedBatch, get_kernel, kernel_names
from pabench_kernels.contract import Kernel
from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
from pabench_kernels.registry import UnknownKernelError
from pabench_kernels.request import KernelRequest, parse_request, split_requests
from pabench_kernels.trace import count_launch

FAULTY = Path(__file__).parents[2] / "faulty" / "kernels.py"


def batch(query_lens=(1, 3), seq_lens=(5, 6)):
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    pool = torch.randn(2, 4 * len(seq_lens), 4, 2, 8, generator=generator)
    return PagedBatch(
        query=torch.randn(sum(query_lens), 4, 8, generator=generator),
        key_cache=pool[0],
        value_cache=pool[1],
        block_table=torch.arange(2 * len(seq_lens), dtype=torch.int32).view(len(seq_lens), 2),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        scale=0.3,
    )


def request(kernel, *phases):
    phases = frozenset(phases or kernel.phases)
    other = get_kernel("torch_paged")
    return KernelRequest(
        kernel.name, kernel.name, {p: kernel if p in phases else other for p in ("prefill", "decode")}, phases
    )


def counted(name, **options):
    def fn(b):
        count_launch(name)
        return torch.zeros_like(b.query)

    return Kernel(name=name, fn=fn, **options)


def test_a_mixed_batch_is_split_by_phase_and_put_together_again():
    both = Dispatcher(parse_request("torch_paged"))
    pair = Dispatcher(parse_request(f"prefill=torch_paged,decode={FAULTY}:honest"))
    b = batch(query_lens=(1, 3, 1), seq_lens=(5, 6, 8))
    torch.testing.assert_close(pair(b, 0), both(b, 0))
    assert {phase for _, _, phase in pair.trace.entered} == {"prefill", "decode"}
    assert {phase for _, _, phase in both.trace.entered} == {"mixed"}


def test_a_counted_kernel_is_proved():
    dispatcher = Dispatcher(request(counted("mine")))
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.proof() == "proved"


def test_a_registered_kernel_that_launches_nothing_is_unknown():
    dispatcher = Dispatcher(request(Kernel(name="mine", fn=lambda b: torch.zeros_like(b.query))))
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.proof() == "unknown"


def test_a_kernel_that_launches_in_one_of_two_layers_is_unknown():
    calls = []

    def fn(b):
        if not calls:
            count_launch("mine")
        calls.append(1)
        return torch.zeros_like(b.query)

    dispatcher = Dispatcher(request(Kernel(name="mine", fn=fn)))
    dispatcher(batch((1, 1)), 0)
    dispatcher(batch((1, 1)), 1)
    assert dispatcher.proof() == "unknown"


def test_nothing_run_is_unknown():
    assert Dispatcher(parse_request("torch_paged")).proof() == "unknown"


def test_a_plain_function_of_a_stranger_is_claimed():
    dispatcher = Dispatcher(parse_request(f"{FAULTY}:honest"))
    dispatcher(batch(), 0)
    assert dispatcher.proof() == "claimed"


def test_entering_another_registered_kernel_is_a_fallback():
    dispatcher = Dispatcher(parse_request(f"{FAULTY}:enters_another"))
    dispatcher(batch(), 3)
    assert dispatcher.proof() == "fell_back"
    assert dict(dispatcher.intruders()) == {("kernels.py:enters_another", "torch_paged", "mixed", 3): 1}


def test_an_unsupported_batch_runs_the_stand_in_and_is_recorded_with_its_reason():
    picky = counted("picky", declared_limits=lambda b: ["head_dim 8"])
    dispatcher = Dispatcher(request(picky))
    b = batch((1, 1))
    torch.testing.assert_close(dispatcher(b, 2), get_kernel("torch_paged")(b))
    (key,) = dispatcher.fallbacks
    assert (key.from_, key.to, key.reasons, key.phase, key.layer) == (
        "picky",
        "torch_paged",
        ("head_dim 8",),
        "decode",
        2,
    )
    assert dispatcher.proof() == "fell_back"
    assert not dispatcher.under_test_ran


def test_a_late_refusal_is_recorded_alike():
    def late(b):
        raise NotImplementedError("no")

    dispatcher = Dispatcher(request(Kernel(name="late", fn=late), "decode"))
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.refused_everything
    assert next(iter(dispatcher.fallbacks)).reasons == ("no",)


def test_a_lone_decode_kernel_is_paired_and_that_is_no_fallback():
    dispatcher = Dispatcher(request(counted("mine"), "decode"))
    dispatcher(batch(), 0)
    assert dispatcher.proof() == "proved"
    assert dispatcher.request.paired == "torch_paged"


def test_refusing_one_phase_only_is_not_refusing_everything():
    picky = counted("picky", declared_limits=lambda b: ["no prefill"] if b.max_query_len > 1 else [])
    dispatcher = Dispatcher(request(picky))
    dispatcher(batch((3, 3)), 0)
    assert not dispatcher.refused_everything
    dispatcher(batch((1, 1)), 0)
    assert not dispatcher.refused_everything
    assert dispatcher.proof() == "fell_back"


@pytest.mark.parametrize(
    "fn",
    [lambda b: None, lambda b: b.query[:, :1], lambda b: b.query.double(), lambda b: [b.query]],
    ids=["none", "shape", "dtype", "list"],
)
def test_what_is_no_attention_output_is_refused(fn):
    with pytest.raises(ContractBrokenError, match=r"'mine' must return a tensor \[2, 4, 8\]"):
        Dispatcher(request(Kernel(name="mine", fn=fn)))(batch((1, 1)), 0)


def test_phases_of_a_batch():
    assert batch((1, 1)).phases == {"decode"}
    assert batch((2, 3)).phases == {"prefill"}
    assert batch((1, 3)).phases == {"prefill", "decode"}
    assert replace(batch((1, 1)), seq_lens=torch.tensor([0, 1])).phases == {"decode"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a,b", "c"], ["a", "b", "c"]),
        (["prefill=a,decode=b"], ["prefill=a,decode=b"]),
        (["x,prefill=a,decode=b,y", "x"], ["x", "prefill=a,decode=b", "y"]),
        (["decode=b"], ["decode=b"]),
        ([" , "], []),
    ],
)
def test_kernel_lists_are_split_but_pairs_stay_whole(values, expected):
    assert split_requests(values) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch_pagd", "did you mean 'torch_paged'"),
        ("nowhere.py:f", "'nowhere.py' does not exist"),
        (f"{FAULTY}:nothing", "no function 'nothing'; its functions are: "),
        (f"{FAULTY}", "no function named"),
        ("decode=triton_prefill", "no decode phase; it has prefill"),
        ("prefill=torch_paged,prefill=torch_paged", "each phase once"),
        ("decode=", "each phase once"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(text, words):
    with pytest.raises(UnknownKernelError, match="kernel") as caught:
        parse_request(text)
    assert words in str(caught.value)


def test_a_file_that_fails_to_import_says_so(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(UnknownKernelError, match="ModuleNotFoundError"):
        get_kernel(f"{tmp_path}/broken.py:f")


def test_a_strangers_phases_must_be_phases(tmp_path):
    (tmp_path / "k.py").write_text("def f(batch): ...\nf.phases = {'decoding'}\n")
    with pytest.raises(UnknownKernelError, match="must be some of prefill, decode"):
        get_kernel(f"{tmp_path}/k.py:f")


def test_launches_of_a_strangers_own_triton_function_are_counted(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def zero(out, N: tl.constexpr):\n"
        "    tl.store(out + tl.arange(0, N), tl.full((N,), 0.0, tl.float32))\n"
        "def launches(batch):\n"
        "    out = torch.empty_like(batch.query)\n"
        "    zero[(1,)](out, 64)\n"
        "    return out\n"
        "def does_not(batch):\n"
        "    return torch.zeros_like(batch.query)\n"
    )
    for function, proof in (("launches", "proved"), ("does_not", "claimed")):
        dispatcher = Dispatcher(parse_request(f"{tmp_path}/mine.py:{function}"))
        dispatcher(batch((1, 1)), 0)
        assert dispatcher.proof() == proof


def test_a_strangers_kernel_is_known_by_its_file_and_function_not_its_path():
    assert get_kernel(f"{FAULTY}:honest").name == "kernels.py:honest"


def test_the_registry_lists_the_built_in_kernels():
    assert {"torch_paged", "triton_decode", "triton_prefill"} <= set(kernel_names())


def test_a_stranger_cannot_take_the_name_of_a_registered_kernel(tmp_path):
    (tmp_path / "spoof.py").write_text(
        "import torch\n"
        "from pabench_kernels.contract import kernel\n"
        "from pabench_kernels.trace import count_launch\n"
        "@kernel('triton_decode')\n"
        "def spoof(batch):\n"
        "    count_launch('triton_decode')\n"
        "    return torch.zeros_like(batch.query)\n"
    )
    dispatcher = Dispatcher(parse_request(f"{tmp_path}/spoof.py:spoof"))
    assert dispatcher.request.name == "spoof.py:spoof"
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.proof() == "fell_back"


def test_a_registered_kernel_that_a_file_re_exports_is_itself(tmp_path):
    (tmp_path / "again.py").write_text("from pabench_kernels.torch_paged import torch_paged\n")
    assert get_kernel(f"{tmp_path}/again.py:torch_paged") is get_kernel("torch_paged")


@pytest.mark.parametrize("raises", [False, True])
def test_scales_that_a_kernel_wrote_into_are_put_back(raises):
    def fn(b):
        b.k_scale.mul_(2)
        if raises:
            raise ZeroDivisionError
        return torch.zeros_like(b.query)

    b = replace(batch((1, 1)), k_scale=torch.tensor(0.3), v_scale=torch.tensor(0.7))
    with pytest.raises(ZeroDivisionError if raises else ContractBrokenError, match=None if raises else "'k_scale'"):
        Dispatcher(request(Kernel(name="mine", fn=fn)))(b, 0)
    assert b.k_scale.item() == pytest.approx(0.3)


def _thread(b):
    import threading

    found = []
    worker = threading.Thread(target=lambda: found.append(get_kernel("torch_paged")(b)))
    worker.start()
    worker.join()
    return found[0]


def _fresh_context(b):
    import contextvars

    return contextvars.Context().run(get_kernel("torch_paged"), b)


@pytest.mark.parametrize("fn", [_thread, _fresh_context], ids=["thread", "context"])
def test_another_kernel_entered_out_of_sight_is_seen(fn):
    dispatcher = Dispatcher(request(Kernel(name="mine", fn=fn, stranger=True)))
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.proof() == "fell_back"


def test_another_kernel_entered_in_unsupported_is_seen():
    answers = []

    def limits(b):
        answers.append(get_kernel("torch_paged")(b))
        return []

    mine = Kernel(name="mine", fn=lambda b: answers.pop(), declared_limits=limits, stranger=True)
    dispatcher = Dispatcher(request(mine))
    dispatcher(batch((1, 1)), 0)
    assert dispatcher.proof() == "fell_back"


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_write_into_an_unowned_cache_slot_is_seen(name):
    def fn(b):
        getattr(b, name)[-1] = 7.0
        return torch.zeros_like(b.query)

    with pytest.raises(ContractBrokenError, match=name):
        Dispatcher(request(Kernel(name="mine", fn=fn)))(batch((1, 1)), 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("f.phases = None", "phases must be some of prefill, decode, got None"),
        ("f.unsupported = ['no']", "unsupported must be a function of the batch, got ['no']"),
        ("f.phases = ()", "phases must be some of"),
    ],
)
def test_unusable_attributes_of_a_stranger_are_one_sentence(tmp_path, line, words):
    (tmp_path / "k.py").write_text(f"def f(batch): ...\n{line}\n")
    with pytest.raises(UnknownKernelError) as caught:
        get_kernel(f"{tmp_path}/k.py:f")
    assert words in str(caught.value)


def test_a_phase_may_be_one_word_and_a_builtin_has_no_signature(tmp_path):
    (tmp_path / "k.py").write_text("import torch\ndef f(batch): ...\nf.phases = 'decode'\ng = torch.relu\n")
    assert get_kernel(f"{tmp_path}/k.py:f").phases == {"decode"}
    assert not get_kernel(f"{tmp_path}/k.py:g").has_lse


class TestPlan:
    """``plan(batch)`` prepares outside of what is timed; the kernel is given what it made."""

    SOURCE = (
        "calls = []\n"
        "def plan(batch):\n    calls.append('plan')\n    return batch.query * 2\n"
        "def mine(batch, state, out=None):\n    calls.append('run')\n"
        "    return state if out is None else out.copy_(state)\n"
        "mine.plan = plan\n"
    )

    def kernel(self, tmp_path):
        (tmp_path / "mine.py").write_text(self.SOURCE)
        return get_kernel(f"{tmp_path / 'mine.py'}:mine")

    def test_a_call_without_a_state_plans_first(self, tmp_path):
        kernel, b = self.kernel(tmp_path), batch()
        assert torch.equal(kernel(b), b.query * 2)
        assert kernel.fn.__globals__["calls"] == ["plan", "run"]

    def test_a_state_is_used_as_it_is_and_out_is_written(self, tmp_path):
        kernel, b = self.kernel(tmp_path), batch()
        state = kernel.plan(b)
        out = torch.zeros_like(b.query)
        assert kernel(b, state=state, out=out) is out
        assert torch.equal(out, b.query * 2)
        assert kernel.fn.__globals__["calls"] == ["plan", "run"]

    def test_a_kernel_without_plan_or_out_says_so(self):
        kernel = get_kernel("torch_paged")
        assert kernel.plan(batch()) is None
        with pytest.raises(TypeError, match="kernel 'torch_paged' takes no out"):
            kernel(batch(), out=torch.zeros(1))

    def test_a_plan_that_the_kernel_cannot_take_is_one_sentence(self, tmp_path):
        (tmp_path / "mine.py").write_text("def mine(batch): pass\nmine.plan = print\n")
        with pytest.raises(UnknownKernelError, match="the kernel must take state="):
            get_kernel(f"{tmp_path / 'mine.py'}:mine")


def test_an_empty_reason_is_no_reason_and_true_is_no_list():
    b = batch((1, 1))
    assert Kernel(name="k", fn=lambda b: None, declared_limits=lambda b: "").unsupported(b) == []
    with pytest.raises(TypeError, match=r"unsupported\(\) of 'k' must return a list of reasons, got True"):
        Kernel(name="k", fn=lambda b: None, declared_limits=lambda b: True).unsupported(b)


def test_scales_per_token_are_for_kernels_that_declare_them(tmp_path):
    (tmp_path / "k.py").write_text("def plain(batch): ...\ndef fine(batch): ...\nfine.per_token_scales = True\n")
    b = batch((1, 1))
    blocks, size, heads = b.key_cache.shape[:3]
    b = replace(b, k_scale=torch.ones(blocks, size, heads))
    plain = get_kernel(f"{tmp_path}/k.py:plain")
    assert plain.unsupported(b) == [f"k_scale must have shape [] or [{heads}], got [{blocks}, {size}, {heads}]"]
    for name in (f"{tmp_path}/k.py:fine", "torch_paged", "triton_split"):
        assert get_kernel(name).unsupported(b) == []
