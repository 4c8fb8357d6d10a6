"""What is special about cpu_native: it is compiled on this machine, cached, threaded and handed raw pointers."""

from __future__ import annotations

import math
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pabench.models.cache import cache_root
from pabench_kernels import cpu_native as module
from pabench_kernels import native_build
from pabench_kernels.contract import PagedBatch
from pabench_kernels.cpu_native import SOURCE, cpu_native
from pabench_kernels.native_build import NO_COMPILER, BuildError, build
from tests.kernels.cases import BF16, CASES, E4M3, E5M2, FP16, FP32, INT8, Case, Phase, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

REPO = Path(__file__).resolve().parents[2]
TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and a process that has not compiled yet."""
    monkeypatch.setenv("PABENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    module._function.cache_clear()
    yield tmp_path / "cache" / "native"
    module._function.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY)
    return source


@pytest.fixture
def batch() -> PagedBatch:
    return make_batch(Case(lens=(20, 18)), "decode")


def compiler_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class TestCompiling:
    def test_no_compiler_is_a_reason(
        self, own_cache: Path, batch: PagedBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert cpu_native.unsupported(batch) == [NO_COMPILER]
        assert NO_COMPILER == "no C++ compiler (install g++ or clang++, or set CXX)"
        with pytest.raises(NotImplementedError, match=r"no C\+\+ compiler"):
            cpu_native(batch)

    def test_cxx_that_is_not_installed(
        self, own_cache: Path, batch: PagedBatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -O2")
        assert cpu_native.unsupported(batch) == [
            "no C++ compiler: CXX names 'no-such-compiler', which is not installed"
        ]

    def test_a_failing_compiler_is_quoted_by_its_first_line(
        self, own_cache: Path, batch: PagedBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        broken = compiler_script(tmp_path / "broken", "echo; echo 'fatal: no headers' >&2; echo more >&2; exit 3")
        monkeypatch.setenv("CXX", broken)
        assert cpu_native.unsupported(batch) == [
            f"{broken} cannot compile cpu_native.cpp (exit status 3): fatal: no headers"
        ]
        assert list(own_cache.iterdir()) == [], "nothing is left behind"

    def test_a_compiler_that_writes_no_library(
        self, own_cache: Path, batch: PagedBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CXX", compiler_script(tmp_path / "lazy", "exit 0"))
        (reason,) = cpu_native.unsupported(batch)
        assert reason.endswith("(exit status 0): it said nothing")

    def test_a_compiler_that_writes_rubbish(
        self, own_cache: Path, batch: PagedBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
        monkeypatch.setenv("CXX", compiler_script(tmp_path / "liar", script))
        (reason,) = cpu_native.unsupported(batch)
        assert reason.startswith("the compiled kernel cannot be loaded: ")

    def test_a_compiler_that_does_not_know_this_cpu_is_asked_again(
        self, own_cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = f'case "$*" in *-march=native*) echo unknown >&2; exit 1;; esac; exec {shutil.which("c++")} "$@"'
        monkeypatch.setenv("CXX", compiler_script(tmp_path / "plain", script))
        assert build(tiny).exists()

    def test_a_cache_that_is_a_file(self, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PABENCH_CACHE", str(tmp_path / "file"))
        with pytest.raises(BuildError, match=r"the cache .* cannot be used .*; set PABENCH_CACHE to a folder"):
            build(tiny)


class TestCache:
    def test_a_library_is_compiled_once(self, own_cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = build(tiny)
        monkeypatch.setattr(native_build, "_compile", lambda *_: pytest.fail("compiled again"))
        assert build(tiny) == first
        assert [path.name for path in own_cache.iterdir()] == [first.name]

    @pytest.mark.parametrize("change", ["source", "compiler", "cpu"])
    def test_another_key_is_another_library(
        self, own_cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        first = build(tiny)
        if change == "source":
            tiny.write_text(TINY.replace("42", "43"))
        elif change == "compiler":
            monkeypatch.setenv("CXX", "c++ -DOTHER")
        else:
            monkeypatch.setattr(native_build, "_cpu", lambda: "another CPU")
        assert build(tiny).name != first.name

    def test_a_library_that_was_cut_off_is_built_anew(self, own_cache: Path, tiny: Path) -> None:
        library = build(tiny)
        whole = library.read_bytes()
        library.write_bytes(whole[: len(whole) // 2])
        assert build(tiny).read_bytes() == whole

    def test_two_processes_at_once(self, own_cache: Path, tiny: Path) -> None:
        code = (
            f"import sys, ctypes; sys.path.insert(0, {str(REPO / 'kernels')!r}); from pathlib import Path; "
            f"from pabench_kernels.native_build import build; print(ctypes.CDLL(build(Path({str(tiny)!r}))).answer())"
        )

        def run(_: int) -> str:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
            return done.stdout + done.stderr

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(run, range(4))) == ["42\n"] * 4
        assert list(own_cache.glob(".*")) == []

    def test_the_cache_lies_where_users_expect_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for override in (str(tmp_path), None):
            monkeypatch.delenv("PABENCH_CACHE", raising=False)
            if override:
                monkeypatch.setenv("PABENCH_CACHE", override)
            assert native_build.cache_dir() == cache_root() / "native"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="switches x86 instructions off")
def test_the_source_needs_no_particular_instructions(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -mno-avx -mno-avx2 -mno-f16c -mno-fma")
    for kv_dtype in (FP32, BF16, FP16, E4M3, E5M2, INT8):
        batch = make_batch(Case(kv_dtype=kv_dtype, head_dim=44, scales="head", cap=5.0), "prefill")
        assert cpu_native.unsupported(batch) == []
        assert wrong_rows(cpu_native(batch), batch, oracle(batch)) == []


class TestWhatOthersCannot:
    @pytest.mark.parametrize("phase", ["decode", "prefill"])
    @pytest.mark.parametrize("kv_dtype", [FP32, BF16, FP16, E4M3, E5M2, INT8], ids=str)
    @pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
    def test_any_cache_dtype_under_any_query_dtype(
        self, dtype: torch.dtype, kv_dtype: torch.dtype, phase: Phase
    ) -> None:
        batch = make_batch(Case(dtype=dtype, kv_dtype=kv_dtype, head_dim=20, scales="head"), phase)
        assert wrong_rows(cpu_native(batch), batch, oracle(batch)) == []

    def test_head_dim_above_256(self) -> None:
        batch = make_batch(Case(head_dim=577, head_dim_v=300, lens=(40, 3)), "prefill")
        assert wrong_rows(cpu_native(batch), batch, oracle(batch)) == []

    def test_query_in_any_strides(self) -> None:
        batch = make_batch(Case(), "decode")
        turned = batch.query.mT.contiguous().mT
        assert torch.equal(cpu_native(changed(batch, query=turned)), cpu_native(batch))

    def test_counts_are_exact_at_65535_tokens(self) -> None:
        """q = 0 and V = 1 in every second token: the answer times the length is a whole number."""
        small = make_batch(Case(group=1, kv_heads=1, head_dim=8, lens=(1,)), "decode")
        length, block_size = 65535, 256
        value = torch.zeros(256, block_size, 1, 8)
        value.view(-1, 8)[:length:2] = 1
        value.view(-1, 8)[length:] = math.nan
        long = changed(
            small,
            query=torch.zeros(1, 1, 8),
            key_cache=torch.zeros_like(value),
            value_cache=value,
            block_table=torch.arange(256, dtype=torch.int32)[None],
            seq_lens=torch.tensor([length], dtype=torch.int32),
            max_seq_len=length,
        )
        out, lse = cpu_native(long, return_lse=True)
        np.testing.assert_allclose(out.double().numpy() * length, 32768, atol=0.01)
        assert float(lse) == pytest.approx(math.log(length), rel=1e-6)


class TestInvariance:
    @pytest.mark.parametrize("case", ["plain", "gqa71", "bf16-everything", "e4m3"])
    @pytest.mark.parametrize("phase", ["decode", "prefill"])
    def test_threads_change_no_bit(self, case: str, phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = make_batch(Case(**{**vars(CASES[case]), "lens": (300, 17, 0, 280)}), phase)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = cpu_native(batch)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
        assert torch.equal(cpu_native(batch), alone)

    def test_chunks_of_a_prompt_change_no_bit(self) -> None:
        batch = make_batch(Case(lens=(50,)), "prefill")
        whole = cpu_native(batch)
        for start, stop in ((0, 7), (7, 30), (30, 50)):
            chunk = changed(
                batch,
                query=batch.query[start:stop],
                seq_lens=torch.tensor([stop], dtype=torch.int32),
                query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
                max_query_len=stop - start,
                max_seq_len=stop,
            )
            assert torch.equal(cpu_native(chunk), whole[start:stop])


class TestRefusals:
    @pytest.mark.parametrize("bad", [-1, 10_000])
    def test_a_block_outside_the_pool_is_not_read(self, batch: PagedBatch, bad: int) -> None:
        table = batch.block_table.clone()
        table[1, 1] = bad
        with pytest.raises(
            ValueError, match=rf"^block_table\[1, 1\] is needed and holds {bad}; the pool has blocks 0…8"
        ):
            cpu_native(changed(batch, block_table=table))

    def test_a_table_with_too_few_columns(self, batch: PagedBatch) -> None:
        with pytest.raises(ValueError, match=r"^block_table\[0, 1\] is needed and holds -1; .* the table 1 columns$"):
            cpu_native(changed(batch, block_table=batch.block_table[:, :1]))

    def test_query_ranges_outside_the_query(self, batch: PagedBatch) -> None:
        starts = torch.tensor([0, 1, 3], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^query_start_loc of sequence 1 must rise within 0…2"):
            cpu_native(changed(batch, query_start_loc=starts))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"query": torch.zeros(2, 6, 64, dtype=torch.float64)}, "query dtype must be fp32, fp16 or bf16"),
            ({"query": torch.zeros(2, 7, 64)}, "7 query heads are no multiple of 2 KV heads"),
            ({"key_cache": torch.zeros(9, 16, 2, 64).double()}, "key_cache must be fp32, fp16, bf16, fp8_e4m3fn"),
            ({"value_cache": torch.zeros(9, 16, 64, 2).mT}, "value_cache's last dimension must be contiguous"),
            ({"k_scale": torch.ones(3)}, "k_scale must have shape [] or [2] or [9, 16, 2], got [3]"),
            ({"query": torch.zeros(2, 6, 64, device="meta")}, "cpu_native runs on the CPU, got tensors on meta"),
        ],
        ids=["query-dtype", "heads", "cache-dtype", "cache-stride", "scale-shape", "device"],
    )
    def test_limits_are_declared(self, batch: PagedBatch, changes: dict[str, object], reason: str) -> None:
        (found,) = cpu_native.unsupported(changed(batch, **changes))
        assert found.startswith(reason)


def test_the_source_ships_with_the_package() -> None:
    assert SOURCE.is_file()
