"""``pabench replay FILE``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `pabench localize --repro FILE` wrote.")],
    kernel: Annotated[
        str | None, typer.Option("-k", "--kernel", help="Another kernel than the one that failed.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    hang_timeout: Annotated[
        float, typer.Option("--hang-timeout", min=0.1, help="Seconds without a sign of life.")
    ] = 300.0,
    in_process: Annotated[bool, typer.Option("--in-process", hidden=True)] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress; only the result.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tracebacks too.")] = False,
) -> None:
    """Judge one stored attention call with any kernel: 0 right, 1 wrong, 3 not supported by the kernel."""
    from pabench.environment import use_interpreter_without_gpu

    use_interpreter_without_gpu(device)

    from pabench.cli.json_errors import json_errors
    from pabench.report.console import ResultConsole, stdout_to_stderr
    from pabench.report.localization import print_replay
    from pabench.report.progress import RunProgress

    with RunProgress(quiet=quiet, verbose=verbose) as progress:
        progress.note("reading the call")
        from pabench.models.load import require_device
        from pabench.runner.options import RunOptions
        from pabench.runner.replay_call import replay_file

        options = RunOptions(argv=(), output=Path(), device=device, hang_timeout_s=hang_timeout, in_process=in_process)
        require_device(device)
        with json_errors(json_), stdout_to_stderr():
            found = replay_file(file, kernel, options, progress)
    if json_:
        typer.echo(found.model_dump_json(indent=2))
    else:
        print_replay(found, ResultConsole())
    raise typer.Exit(0 if found.status == "PASS" else 1)
