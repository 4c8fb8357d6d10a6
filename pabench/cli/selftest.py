"""``pabench selftest``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def selftest(
    kernel: Annotated[
        str | None, typer.Option("-k", "--kernel", help="Plant the faults around this kernel.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Selects inputs and prompts.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Repeat with so many seeds, counted from --seed.")] = 1,
    hang_timeout: Annotated[
        float, typer.Option("--hang-timeout", min=0.1, help="Seconds without a sign of life.")
    ] = 300.0,
    in_process: Annotated[bool, typer.Option("--in-process", hidden=True)] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress; only the result.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks too.")] = False,
) -> None:
    """Plant known faults and see which checks catch them, and that honest kernels raise no alarm."""
    from pabench.environment import use_interpreter_without_gpu

    use_interpreter_without_gpu("cpu")

    from pabench.report.console import ResultConsole, stdout_to_stderr
    from pabench.report.progress import RunProgress
    from pabench.report.selftest import print_selftest

    results, cases = [], []
    with RunProgress(quiet=quiet, verbose=verbose) as progress:
        progress.note("importing torch and transformers")
        from pabench.runner.options import RunOptions
        from pabench.runner.selftest import run_selftest

        for n in range(seeds):
            options = RunOptions(
                argv=(), output=Path(), seed=seed + n, hang_timeout_s=hang_timeout, in_process=in_process
            )
            with stdout_to_stderr():
                result, records = run_selftest(kernel, options, progress)
            results.append(result)
            cases += records
    if json_:
        import json

        first = results[0].model_dump(mode="json")
        more = {"seeds": [r.model_dump(mode="json", exclude={"matrix"}) for r in results]} if seeds > 1 else {}
        typer.echo(json.dumps({"selftest": {**first, **more}, "cases": cases}, indent=2))
    else:
        for result in results:
            print_selftest(result, ResultConsole())
    raise typer.Exit(0 if all(r.gating for r in results) else 1)
