"""The adapters for GPUs, without one: refused with what was really found, and given to stand-ins of their libraries
that read the arguments as the library documents them and answer with torch_paged."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pabench_kernels import get_kernel
from pabench_kernels.adapters import flash_attn_adapter, flashinfer_adapter, vllm_rocm_adapter, vllm_triton_adapter
from pabench_kernels.contract import PagedBatch
from pabench_kernels.torch_paged import torch_paged
from tests.kernels.adapters.checks import without_nan
from tests.kernels.cases import BF16, FP16, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

GPU_ONLY = {"vllm_triton": "a GPU", "vllm_rocm": "an AMD GPU", "flash_attn": "a GPU", "flashinfer": "an NVIDIA GPU"}
CASES = {
    "plain": Case(dtype=FP16, block_size=256, lens=(17, 0, 300, 1, 256)),
    "window": Case(dtype=BF16, block_size=256, lens=(600, 9), window=100),
    "cap": Case(dtype=FP16, block_size=256, lens=(40, 260), cap=5.0),
    "bidirectional": Case(dtype=FP16, block_size=256, lens=(40, 0, 260), causal=False),
    "alibi": Case(dtype=FP16, block_size=256, lens=(40, 260), alibi=True),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", GPU_ONLY)
def test_without_a_gpu_the_reasons_are_said(name):
    reasons = get_kernel(name).unsupported(make_batch(CASES["plain"], "decode"))
    assert f"needs {GPU_ONLY[name]}, and this machine has none" in reasons
    assert any("runs on cuda, got tensors on cpu" in reason for reason in reasons)


def answer(query, keys, values, table, seq_lens, starts, **changes):
    return torch_paged(
        PagedBatch(
            query=query,
            key_cache=keys,
            value_cache=values,
            block_table=table,
            seq_lens=seq_lens,
            query_start_loc=starts,
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(seq_lens.max()),
            **changes,
        )
    )


def window_of(window_size):
    left, right = window_size
    assert right in (0, -1)
    return None if left < 0 else left + 1


@pytest.fixture
def flash_attn(monkeypatch):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, block_table=None,
    ):  # fmt: skip
        assert int(block_table.min()) >= 0
        lens = cu_seqlens_k.diff()
        assert (int(lens.max()), int(cu_seqlens_q.diff().max())) == (max_seqlen_k, max_seqlen_q)
        return answer(
            q, k, v, block_table, lens, cu_seqlens_q, scale=softmax_scale, causal=causal, alibi_slopes=alibi_slopes,
            sliding_window=window_of(window_size), logits_soft_cap=softcap or None,
        )  # fmt: skip

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    yield flash_attn_adapter.flash_attn
    flash_attn_adapter._function.cache_clear()


@pytest.fixture
def flashinfer(monkeypatch):
    class Wrapper:
        def __init__(self, workspace, kv_layout):
            assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
        ):  # fmt: skip
            pages = paged_kv_indptr.diff()
            assert int(paged_kv_last_page_len.min()) >= 1
            assert int(paged_kv_last_page_len.max()) <= page_size
            self.table = torch.nn.utils.rnn.pad_sequence(paged_kv_indices.split(pages.tolist()), batch_first=True)
            self.lens = (pages - 1) * page_size + paged_kv_last_page_len
            self.starts = qo_indptr
            window = None if window_left < 0 else window_left + 1
            self.rest = {"scale": sm_scale, "causal": causal, "sliding_window": window}
            self.rest["logits_soft_cap"] = logits_soft_cap

        def run(self, q, paged_kv_cache):
            return answer(q, *paged_kv_cache, self.table.int(), self.lens.int(), self.starts, **self.rest)

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    yield flashinfer_adapter.flashinfer
    flashinfer_adapter._library.cache_clear()


@pytest.fixture
def vllm_triton(monkeypatch):
    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=None, sinks=None,
    ):  # fmt: skip
        out.copy_(
            answer(
                q,
                k,
                v,
                block_table,
                seqused_k,
                cu_seqlens_q,
                scale=softmax_scale,
                causal=causal,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                sliding_window=window_of(window_size),
                logits_soft_cap=softcap or None,
            )
        )

    monkeypatch.setattr(vllm_triton_adapter, "_function", lambda: unified_attention)
    return vllm_triton_adapter.vllm_triton


@pytest.fixture
def vllm_rocm(monkeypatch):
    def paged_attention_rocm(
        out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        query_start_loc, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
    ):  # fmt: skip
        blocks, heads, _, size, _ = key_cache.shape
        assert exp_sum.shape == (len(seq_lens), query.shape[1], -(-max_seq_len // 256))
        keys = key_cache.permute(0, 3, 1, 2, 4).reshape(blocks, size, heads, -1)
        values = value_cache.permute(0, 3, 1, 2)
        out.copy_(
            answer(query, keys, values, block_tables, seq_lens, query_start_loc, scale=scale, alibi_slopes=alibi_slopes)
        )

    monkeypatch.setattr(vllm_rocm_adapter, "_function", lambda: paged_attention_rocm)
    return vllm_rocm_adapter.vllm_rocm


UNDOCUMENTED = {  # which of CASES a library has no words for
    "vllm_triton": set(),
    "vllm_rocm": {"window", "cap"},
    "flash_attn": set(),
    "flashinfer": {"alibi"},
}
ABSENT = ("is not installed", "another build", "this machine has none", "runs on cuda")


def given(name):
    for case, value in CASES.items():
        size = 16 if name == "vllm_rocm" else value.block_size
        for phase in ("decode",) if name == "vllm_rocm" else ("decode", "prefill"):
            yield case, make_batch(replace(value, block_size=size), phase)


@pytest.mark.parametrize("name", GPU_ONLY)
def test_the_library_is_given_what_it_documents(name, request):
    kernel = request.getfixturevalue(name)
    for case, batch in given(name):
        if case not in UNDOCUMENTED[name]:
            finite = without_nan(batch)
            assert wrong_rows(kernel(finite), finite, oracle(finite)) == [], case
            assert wrong_rows(kernel(changed(finite, scale=finite.scale * 1.1)), finite, oracle(finite)), case


@pytest.mark.parametrize("name", GPU_ONLY)
def test_only_what_has_no_words_is_refused(name):
    kernel = get_kernel(name)
    for case, batch in given(name):
        reasons = [r for r in kernel.unsupported(batch) if not any(word in r for word in ABSENT)]
        assert bool(reasons) == (case in UNDOCUMENTED[name]), (case, reasons)


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("flash_attn", Case(dtype=FP16), "blocks of multiples of 256, got 16"),
        ("flash_attn", Case(), "computes in float16, bfloat16, got float32"),
        ("flashinfer", Case(dtype=FP16, head_dim=80), "has head_dim 64, 128, 256, got 80"),
        ("flashinfer", Case(dtype=FP16, alibi=True), "has no ALiBi"),
        ("vllm_triton", Case(block_size=17), "blocks of multiples of 16, got 17"),
        ("vllm_rocm", Case(dtype=FP16, group=17), "at most 16 query heads per KV head, got 17"),
        ("vllm_rocm", Case(dtype=FP16, sinks=True), "has no sinks"),
    ],
)
def test_limits_are_declared(name, case, reason):
    assert any(reason in found for found in get_kernel(name).unsupported(make_batch(case, "decode")))
