"""``pabench doctor``"""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda or cuda:N; cuda where there is one.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """What can be judged on this machine, what is missing, and what it cannot show. Exit 3 if nothing can be judged."""
    from pabench.doctor import default_device, examine
    from pabench.environment import use_interpreter_without_gpu
    from pabench.report.console import ResultConsole, stdout_to_stderr

    chosen = device or default_device()
    use_interpreter_without_gpu(chosen)
    with stdout_to_stderr():
        found = examine(chosen)
    if json_:
        import dataclasses
        import json

        shown = {**dataclasses.asdict(found), "can_judge": found.can_judge, "exit_code": found.exit_code}
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        from pabench.report.doctor import print_examination

        print_examination(found, ResultConsole())
    raise typer.Exit(found.exit_code)
