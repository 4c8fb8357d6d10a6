"""``pabench compile``"""

from __future__ import annotations

from typing import Annotated

import typer


def _list(flag: str, values: list[str] | None) -> list[str] | None:
    """Repeated options and comma-separated values alike; an empty value is a mistake."""
    from pabench.errors import UsageError

    if values and not all(v.strip(" ,") for v in values):
        raise UsageError(f"{flag} was given an empty value; name something, or leave {flag} out")
    return None if not values else [v.strip() for value in values for v in value.split(",") if v.strip()]


def compile_(
    kernel: Annotated[
        list[str] | None,
        typer.Option("-k", "--kernel", help="Kernel name or FILE.py:FUNCTION; else every one.", show_default=False),
    ] = None,
    backend: Annotated[list[str] | None, typer.Option("--backend", hidden=True)] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", help="sm_80, sm_89, sm_90, sm_100, sm_120, gfx942, gfx950.", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", help="fp32, fp16, bf16; fp8_e4m3, fp8_e5m2, int8: a KV cache under bf16.", show_default=False
        ),
    ] = None,
    head_dim: Annotated[
        list[str] | None, typer.Option("--head-dim", help="64, 80, 128, 256 or any other.", show_default=False)
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Every combination, not only every pair of values (takes long).")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", help="Compiles at a time; else one per core.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress; only the result.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="A line a case, and the compiler's words.")] = False,
) -> None:
    """Compile Triton kernels for GPUs that need not be there: does the compiler take what the kernel says it takes?"""
    from pabench.compilation.run import CompileOptions, compile_kernels
    from pabench.report.compile_progress import CompileProgress

    names = _list("-k", [*(kernel or []), *(backend or [])])
    options = CompileOptions(
        kernels=names and [name.removeprefix("prefill=").removeprefix("decode=") for name in names],
        targets=_list("--target", target),
        dtypes=_list("--dtype", dtype),
        head_dims=_list("--head-dim", head_dim),
        full=full,
        jobs=jobs,
    )
    with CompileProgress(quiet=quiet, verbose=verbose) as progress:
        report = compile_kernels(options, progress)
    if json_:
        import json

        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        from pabench.report.compile_table import print_compiled
        from pabench.report.console import ResultConsole

        print_compiled(report.as_json(), ResultConsole())
    raise typer.Exit(report.exit_code)
