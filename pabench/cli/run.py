"""``pabench run [SUITE]``"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OnFallback(StrEnum):
    fail = "fail"
    warn = "warn"
    allow = "allow"


def _list(values: list[str] | None) -> list[str] | None:
    """Repeated options and comma-separated values alike."""
    return None if not values else [v.strip() for value in values for v in value.split(",") if v.strip()]


def run(
    suite: Annotated[str, typer.Argument(metavar="[SUITE]", help="A built-in suite or a YAML file.")] = "quick",
    model: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", help="Directory, .gguf file, hub id or built-in name.", show_default=False),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "-k", "--kernel", help="Kernel name, prefill=A,decode=B, or FILE.py:FUNCTION.", show_default=False
        ),
    ] = None,
    backend: Annotated[list[str] | None, typer.Option("--backend", hidden=True)] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="fp32, bf16, fp16, fp8 (bf16 over an fp8_e4m3 KV cache).", show_default=False),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", help="auto, fp8_e4m3, fp8_e5m2 or int8.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens per KV block.", show_default=False)
    ] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", hidden=True)] = None,
    checks: Annotated[
        list[str] | None, typer.Option("--checks", help="What to judge: kernel, model.", show_default=False)
    ] = None,
    batch_spec: Annotated[
        list[str] | None,
        typer.Option(
            "--batch-spec",
            help="Kernel check: shapes by name, like 8q1s4k_2q2k, or a captured call's .json.",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        list[str] | None,
        typer.Option("--probe", help="Kernel check: see `pabench list probes`.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help="Generated tokens per prompt.", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="Your prompts: one a line, or JSON lines.", metavar="FILE", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Selects prompts: another seed is another test.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    on_fallback: Annotated[
        OnFallback, typer.Option("--on-fallback", help="When another kernel would have to stand in.")
    ] = OnFallback.fail,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Results root; the run's folder is made inside it.")
    ] = Path("results"),
    capture: Annotated[
        Path | None,
        typer.Option(
            "--capture", metavar="DIR", help="Write a few attention calls of each model case there.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest unfinished run of the same options.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch a network.")] = False,
    hang_timeout: Annotated[
        float,
        typer.Option(
            "--hang-timeout", min=0.1, metavar="SECONDS", help="A case without a sign of life for so long is ended."
        ),
    ] = 300,
    in_process: Annotated[
        bool, typer.Option("--in-process", hidden=True, help="No child processes: for debuggers.")
    ] = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 whatever the verdict (errors of use still exit 2).")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress; only the result.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks of crashed cases too.")] = False,
) -> None:
    """Judge paged kernels on generated batches, and inside real models: logits, tokens and every attention call."""
    from pabench.errors import UsageError
    from pabench.suite import load_suite

    lists = {"-m": model, "-k": [*(kernel or []), *(backend or [])], "--dtype": dtype, "--checks": checks}
    for flag, values in lists.items():
        if values and not all(v.strip(" ,") for v in values):
            raise UsageError(f"{flag} was given an empty value; name something, or leave {flag} out")
    if block_size is not None and page_size is not None:
        raise UsageError("--block-size and --page-size are one option; give it once")
    if prompts == "":
        raise UsageError("--prompts was given an empty value; name a file, or leave --prompts out")
    changes = {
        "models": _list(model),
        "kernels": _kernels([*(kernel or []), *(backend or [])]),
        "dtypes": _list(dtype),
        "kv_dtype": kv_dtype,
        "block_size": block_size if block_size is not None else page_size,
        "checks": _list(checks),
        "max_new_tokens": max_new_tokens,
        "kernel_check": {k: v for k, v in (("batch_specs", _list(batch_spec)), ("probes", _list(probe))) if v} or None,
    }
    chosen = load_suite(suite, {k: v for k, v in changes.items() if v is not None})

    if capture is not None:
        _make_folder(capture, chosen.checks)

    from pabench.environment import use_interpreter_without_gpu

    use_interpreter_without_gpu(device)

    from pabench.report.console import ResultConsole, stdout_to_stderr
    from pabench.report.progress import RunProgress
    from pabench.report.table import print_run

    with RunProgress(quiet=quiet, verbose=verbose) as progress:
        progress.note("importing torch and transformers")  # seconds, so only once something moves on the screen
        from pabench.runner import RunOptions, run_suite

        options = RunOptions(
            argv=tuple(a.encode(errors="surrogateescape").decode(errors="replace") for a in sys.argv[1:]),
            output=output,
            seed=seed,
            device=device,
            on_fallback=on_fallback.value,
            offline=offline,
            prompts_file=prompts,
            resume=resume,
            suite_text=suite,
            hang_timeout_s=hang_timeout,
            in_process=in_process,
            capture=None if capture is None else capture.absolute(),
        )
        progress.note("resolving models")
        with stdout_to_stderr():  # stdout is for the result, whatever a kernel prints
            finished = run_suite(chosen, options, progress)
    if json_:
        import json

        from pabench.records import jsonable

        cases = [jsonable(r) for r in finished.records]
        typer.echo(json.dumps({**jsonable(finished.header), "cases": cases}, indent=2))
    else:
        print_run(finished.header, list(finished.records), ResultConsole(), path=finished.folder)
    if not exit_zero:
        raise typer.Exit(finished.header.summary.exit_code or 0)


def _kernels(values: list[str]) -> list[str] | None:
    from pabench_kernels.request import split_requests

    return split_requests(values) or None


def _make_folder(capture: Path, checks: tuple[str, ...]) -> None:
    from pabench.errors import UsageError

    if "model" not in checks:
        raise UsageError("--capture writes attention calls of model cases; add model to --checks")
    try:
        capture.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--capture {capture} cannot be made a folder: {error.strerror or error}") from error
