"""``pabench localize -m MODEL -k KERNEL``"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from pabench.cli.run import OnFallback


def localize(
    model: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", help="Directory, hub id or built-in name; smollm2-135m.", show_default=False),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "-k", "--kernel", help="Kernel name, prefill=A,decode=B, or FILE.py:FUNCTION.", show_default=False
        ),
    ] = None,
    backend: Annotated[list[str] | None, typer.Option("--backend", hidden=True)] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16, fp16 or fp8.")] = "bf16",
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", help="auto, fp8_e4m3, fp8_e5m2 or int8.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens per KV block.", show_default=False)
    ] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", hidden=True)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help="Generated tokens per prompt.", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="Your prompts: one a line, or JSON lines.", metavar="FILE", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Selects prompts.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    on_fallback: Annotated[
        OnFallback, typer.Option("--on-fallback", help="When another kernel would have to stand in.")
    ] = OnFallback.fail,
    repro: Annotated[
        Path | None,
        typer.Option(
            "--repro", metavar="FILE", help="Where the failing call goes; default: under -o.", show_default=False
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Results root.")] = Path("results"),
    offline: Annotated[bool, typer.Option("--offline", help="Never touch a network.")] = False,
    hang_timeout: Annotated[
        float, typer.Option("--hang-timeout", min=0.1, help="Seconds without a sign of life.")
    ] = 300.0,
    in_process: Annotated[bool, typer.Option("--in-process", hidden=True)] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress; only the result.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks too.")] = False,
) -> None:
    """Find where a kernel goes wrong in a model: step, layer, head, block and slot, why, and a file that replays it."""
    from pabench.errors import UsageError
    from pabench.suite import load_suite
    from pabench_kernels.request import split_requests

    kernels = [*(kernel or []), *(backend or [])]
    if not kernels:
        raise UsageError("no kernel was given; name one with -k, see `pabench list kernels`")
    models = model or ["smollm2-135m"]
    for flag, values in (("-m", models), ("-k", kernels)):
        if len(values) != 1 or not values[0].strip():
            raise UsageError(f"localize looks at one case; {flag} must name one, got {', '.join(values)!r}")
    (named,), (chosen_model,) = kernels, models
    if block_size is not None and page_size is not None:
        raise UsageError("--block-size and --page-size are one option; give it once")
    changes = {
        "models": [chosen_model],
        "kernels": split_requests([named]),
        "dtypes": [d.strip() for d in dtype.split(",") if d.strip()],
        "kv_dtype": kv_dtype,
        "block_size": block_size if block_size is not None else page_size,
        "max_new_tokens": max_new_tokens,
        "checks": ["model"],
    }
    suite = load_suite("quick", {k: v for k, v in changes.items() if v is not None})
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{Path(chosen_model).name}_{Path(named).name}_{dtype}").strip("-")
    target = repro or output / "repros" / f"{slug}.safetensors"

    from pabench.environment import use_interpreter_without_gpu

    use_interpreter_without_gpu(device)

    from pabench.cli.json_errors import json_errors
    from pabench.report.console import ResultConsole, stdout_to_stderr
    from pabench.report.localization import print_localization
    from pabench.report.progress import RunProgress

    with RunProgress(quiet=quiet, verbose=verbose) as progress:
        progress.note("importing torch and transformers")
        from pabench.runner.localize import localize_case
        from pabench.runner.options import RunOptions

        options = RunOptions(
            argv=(),
            output=output,
            seed=seed,
            device=device,
            on_fallback=on_fallback.value,
            offline=offline,
            prompts_file=prompts,
            hang_timeout_s=hang_timeout,
            in_process=in_process,
        )
        with json_errors(json_), stdout_to_stderr():
            found = localize_case(suite, options, progress, target)
    if json_:
        typer.echo(found.model_dump_json(indent=2))
    else:
        print_localization(found, ResultConsole())
    raise typer.Exit(0 if found.verdict == "clean" else 1)
