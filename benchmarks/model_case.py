"""What a judged model case costs, over two plain `generate` calls of the same tokens, in one process.

    python benchmarks/model_case.py [--dtype fp32] [--suite quick]

"case" is the paged run with shadow mode and comparison; "share" is the reference run (tokens, noise floor, oracle) that
all kernels of one dtype share.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from pabench.checks.model import judge
from pabench.models.load import load_model, resolve_model
from pabench.prompts import choose
from pabench.reference.run import run_reference
from pabench.suite import load_suite
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.request import parse_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    options = parser.parse_args()
    suite = load_suite(options.suite)
    source = resolve_model(suite.models[0])
    dtype = TORCH_DTYPES[options.dtype]
    loaded = load_model(source, dtype=dtype)
    oracle = load_model(source, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
    texts = choose(suite.prompts.kinds, 0)
    prompts = [loaded.tokenizer(p.text)["input_ids"][: suite.prompts.max_tokens] for p in texts]

    def generate() -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            n = suite.max_new_tokens
            mask = torch.ones_like(ids)
            loaded.model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False)

    generate()  # warm-up
    started = time.perf_counter()
    generate()
    generate()
    plain = time.perf_counter() - started
    started = time.perf_counter()
    reference = run_reference(loaded, prompts, suite.max_new_tokens, oracle_model=oracle)
    share = time.perf_counter() - started
    print(f"{source.name} {options.dtype}: two generate calls {plain:.1f} s, reference share {share / plain:.2f} ×")
    for text in suite.kernels:
        started = time.perf_counter()
        outcome = judge(
            reference,
            parse_request(text),
            block_size=suite.block_size,
            token_budget=suite.token_budget,
            on_fallback="fail",
            stop_tokens=(),
        )
        case = time.perf_counter() - started
        whole = (case + share) / plain
        print(f"  {text}: {outcome.status}, case {case / plain:.2f} ×, with the whole share {whole:.2f} ×")
    reference.close()


if __name__ == "__main__":
    main()
