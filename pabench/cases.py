"""Suite → the cases of a run, with the names they are known by. No torch."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pabench.prompts import Prompt
from pabench.suite import Suite


@dataclass(frozen=True)
class Precision:
    """A --dtype value resolved: compute dtype and KV dtype by their recorded names."""

    asked: str  # as the user writes it: fp32, bf16, fp16 or fp8
    dtype: str
    kv_dtype: str

    @property
    def quantized(self) -> bool:
        return self.kv_dtype != self.dtype


def precisions(suite: Suite, dtypes: Sequence[str] | None = None) -> list[Precision]:
    """fp8 means bf16 compute over an fp8_e4m3 cache; an explicit kv_dtype holds for every dtype. ``dtypes`` replace
    the suite's."""
    found = []
    for asked in dtypes or suite.dtypes:
        dtype = "bf16" if asked == "fp8" else asked
        automatic = "fp8_e4m3" if asked == "fp8" else dtype
        found.append(Precision(asked, dtype, automatic if suite.kv_dtype == "auto" else suite.kv_dtype))
    return list({(p.dtype, p.kv_dtype): p for p in found}.values())


@dataclass(frozen=True)
class ModelCase:
    """One kernel request × model × precision × block size; ``inputs`` digests prompts, lengths and weights."""

    model: str
    kernel: str
    kernel_text: str
    precision: Precision
    block_size: int
    inputs: str
    repro: str

    @property
    def pair_key(self) -> str:
        p = self.precision
        return f"model:{self.model}:{p.dtype}:kv-{p.kv_dtype}:b{self.block_size}:{self.inputs}"

    @property
    def case_id(self) -> str:
        return f"{self.pair_key}:{self.kernel}"


def inputs_digest(suite: Suite, prompts: Sequence[Prompt], fingerprint: str) -> str:
    """Short digest of everything but kernel and precision that can change a case's numbers."""
    parts = [
        fingerprint,
        [p.text for p in prompts],
        suite.max_new_tokens,
        suite.token_budget,
        suite.prompts.max_tokens,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def config_of(suite: Suite, seed: int, prompts: Sequence[Prompt], **more: Any) -> tuple[dict[str, Any], str]:
    """The resolved configuration and its hash: two runs with one hash do the same work."""
    config = {**suite.model_dump(mode="json"), "seed": seed, "prompt_ids": [p.id for p in prompts], **more}
    digest = hashlib.sha256(
        json.dumps([config, [p.text for p in prompts]], sort_keys=True, default=str).encode()
    ).hexdigest()
    return config, digest


def repro_command(
    suite: Suite,
    suite_text: str,
    model: str,
    kernel_text: str,
    precision: Precision,
    *,
    seed: int,
    prompts_file: str | None,
    device: str,
    on_fallback: str,
) -> str:
    """A command that runs this one case again; suite, model and kernel as the user wrote them."""
    words = ["pabench", "run", suite_text, "-m", model, "-k", kernel_text, "--dtype", precision.asked]
    if suite.kv_dtype != "auto":
        words += ["--kv-dtype", suite.kv_dtype]
    words += ["--block-size", str(suite.block_size), "--max-new-tokens", str(suite.max_new_tokens), "--seed", str(seed)]
    if prompts_file:
        words += ["--prompts", prompts_file]
    if device != "cpu":
        words += ["--device", device]
    if on_fallback != "fail":
        words += ["--on-fallback", on_fallback]
    return shlex.join(words)
