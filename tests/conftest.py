"""Set up before torch or triton can be imported, and records to build tests from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two spinning OpenMP threads cost 8× beside another process
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPO = Path(__file__).resolve().parent.parent
MakeRecord = Callable[..., Any]


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture
def groups() -> dict[str, Any]:
    """Constructor arguments of every group of an honest model record, as plain data."""
    kld = {"mean": 4e-4, "stderr": 1e-5, "median": 1e-4, "p95": 1e-3, "p99": 2e-3, "max": 5e-3}
    return {
        "execution": {
            "requested": {"prefill": "torch_paged", "decode": "triton_decode"},
            "selected": {"prefill": "torch_paged", "decode": "triton_decode"},
            "executed": {"torch_paged": 30, "triton_decode": 720},
            "paired": "torch_paged",
            "proof": "proved",
        },
        "accuracy": {
            "rel_l2_max": 0.002,
            "noise_floor": 0.0017,
            "ratio_to_floor": 1.2,
            "max_abs": 0.01,
            "max_ulp": 2,
            "tolerance_ratio": 0.41,
            "worst": {"seq": 0, "q_head": 3, "kv_head": 1, "token": 17, "dim": 5},
        },
        "logits": {
            "n_tokens": 120,
            "kld": kld,
            "dp": {"mean": 0.0, "rms": 0.01, "p1": -0.02, "p99": 0.02},
            "same_top_p": 0.99,
            "ppl_ratio": 1.001,
            "max_abs": 0.2,
            "noise_floor": {"kld_mean": 5e-4, "margin": 0.125},
        },
        "tokens": {
            "n_seq": 5,
            "divergence_index": {"min": 14, "median": 20.0, "max": 29},
            "prefix_match": 0.8,
            "classes": {"identical": 4, "near_tie": 1},
            "first": {
                "prompt": "story",
                "index": 14,
                "reference_token": 3681,
                "candidate_token": 260,
                "margin": 0.05,
                "margin_over_floor": 0.4,
                "reference_text": " Paris",
                "candidate_text": " the",
                "prompt_text": "Once upon a time, in a town beside the sea, there lived",
            },
        },
    }


@pytest.fixture
def make_record(groups: dict[str, Any]) -> MakeRecord:
    """``make_record(status="FAIL", kernel="x", …)``: an honest model record with some fields changed."""
    from pabench.records import Record

    def make(case: str = "a", **changes: Any) -> Record:
        status = changes.get("status", "PASS")
        kernel = changes.get("kernel", "triton_decode")
        data = {
            "case_id": f"model/{case}/{kernel}",
            "pair_key": f"model/{case}",
            "check": "model",
            "model": "smollm2-135m",
            "kernel": kernel,
            "dtype": "bf16",
            "kv_dtype": "bf16",
            "block_size": 16,
            "status": status,
            "message": "" if status in ("PASS", "NEAR_TIE") else "mean KLD is 9.1 × the noise floor (limit 3)",
            "repro": f"pabench run quick -k {kernel} --dtype bf16",
            **groups,
            **changes,
        }
        return Record.model_validate(data)

    return make


@pytest.fixture
def make_header() -> Callable[..., Any]:
    """``make_header(records, run_id=…, environment={…})``: a finished header that counts these records."""
    from pabench.records import RunHeader, summarize

    def make(records: Any = None, *, run_id: str = "20260101T000000Z_abc1234_cpu", **changes: Any) -> RunHeader:
        run = {
            "id": run_id,
            "created_utc": "2026-01-01T00:00:00Z",
            "argv": ["run", "quick"],
            "suite": "quick",
            "config": {"dtype": ["bf16"]},
            "config_hash": changes.pop("config_hash", "c0ffee"),
            "seed": changes.pop("seed", 0),
        }
        data: dict[str, Any] = {
            "run": run,
            "environment": {"torch": "2.13.0+cpu", "triton": "3.9.0", "triton_mode": "interpreter", "device": "cpu"},
            **changes,
        }
        if records is not None:
            data["summary"] = summarize(records)
        return RunHeader.model_validate(data)

    return make


@pytest.fixture
def store(tmp_path: Path, make_header: Callable[..., Any]) -> Callable[..., Path]:
    """``store(records)``: a finished run folder on disk; its path is returned."""
    from pabench.results import RunFolder

    def make(records: Any, **changes: Any) -> Path:
        folder = RunFolder.create(tmp_path / "results", device="cpu", git_sha="abc1234def")
        folder.start(make_header(run_id=folder.run_id, **changes))
        for record in records:
            folder.append(record)
        folder.finish(make_header(records, run_id=folder.run_id, **changes))
        return folder.path

    return make
