"""Help, version, errors and exit codes of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pabench import __version__
from pabench.cli import app as app_module
from pabench.errors import CannotJudge

runner = CliRunner()
COMMANDS = ("run", "compare", "plan", "report", "list", "compile", "doctor", "schema")


def pabench(*args, code=None, **env):
    """Run ``python -m pabench`` in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else ["-m", "pabench"]), *args],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)], ids=str)
def test_every_command_explains_itself(command, flag):
    result = runner.invoke(app_module.app, [*command, flag])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_the_help_names_all_commands_and_exit_codes():
    text = runner.invoke(app_module.app, ["--help"]).stdout
    assert all(command in text for command in COMMANDS)
    assert "3 could not judge" in text


def test_the_version():
    assert runner.invoke(app_module.app, ["--version"]).stdout == f"pabench {__version__}\n"


def test_without_arguments_the_help_is_shown():
    result = runner.invoke(app_module.app, [])
    assert "Usage:" in result.output


@pytest.mark.parametrize("args", [["kompare"], ["compare", "only-one"], ["report", "x", "--colour"]], ids=str)
def test_a_usage_error_exits_2(args):
    assert runner.invoke(app_module.app, args).exit_code == 2


def test_a_mistyped_command_is_answered_with_the_right_one():
    assert "Did you mean 'compare'" in runner.invoke(app_module.app, ["kompare"]).output


@pytest.fixture
def tiny(monkeypatch):
    """An app with the group's habits whose command raises what it is given."""

    def make(error=None):
        app = typer.Typer(cls=app_module.Group, context_settings={"token_normalize_func": app_module._dashes})
        app.callback()(lambda: None)

        @app.command("go")
        def go(kv_dtype: str = "auto") -> None:
            if error is not None:
                raise error
            typer.echo(kv_dtype)

        return app

    return make


def test_a_users_mistake_is_one_sentence_on_stderr(tiny):
    result = runner.invoke(tiny(CannotJudge("no such baseline 'x'")), ["go"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "error: no such baseline 'x'\n")


def test_an_interrupt_exits_130(tiny):
    assert runner.invoke(tiny(KeyboardInterrupt()), ["go"]).exit_code == 130


def test_underscores_in_options_are_understood(tiny):
    assert runner.invoke(tiny(), ["go", "--kv_dtype", "fp8_e4m3"]).stdout == "fp8_e4m3\n"
    assert runner.invoke(tiny(), ["go", "--kv-dtype=fp8_e4m3"]).stdout == "fp8_e4m3\n"


def test_a_bug_prints_a_traceback_and_exits_4():
    code = (
        "import sys; import pabench.__main__ as m; import pabench.cli.app as a\n"
        "def boom(*_, **__): raise ZeroDivisionError('boom')\n"
        "a.app = boom; sys.exit(m.main())"
    )
    result = pabench(code=code)
    assert result.returncode == 4
    assert "Traceback" in result.stderr
    assert "bug in pabench" in result.stderr


@pytest.mark.parametrize(("given", "seen"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, seen, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = (
        "import os, pabench.__main__ as m; import pabench.cli.app as a\n"
        "a.app = lambda **_: print(os.environ['OMP_WAIT_POLICY']); m.main()"
    )
    assert pabench(code=code, **given).stdout == f"{seen}\n"


EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLAN = ["plan", "-m", str(EXAMPLES / "llama-3-8b.json"), "--devices", str(EXAMPLES / "two-gpus.json")]
LIGHT = [
    PLAN,
    ["--help"],
    ["--version"],
    ["list", "kernels"],
    ["list", "models"],
    ["list", "suites"],
    ["list", "faults"],
]


@pytest.mark.parametrize("args", [*LIGHT, ["report", "STORED"], ["compare", "STORED", "STORED"], ["schema"]], ids=str)
def test_light_commands_leave_torch_and_transformers_alone(args, store, make_record):
    args = [str(store([make_record()])) if a == "STORED" else a for a in args]
    result = imports_of(args)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_that_check_sees_a_heavy_import():
    assert imports_of(["list", "faults"], before="import torch").stdout.splitlines()[-1] == "heavy: ['torch']"


def imports_of(args, before="pass"):
    code = (
        f"import sys; {before}\nsys.argv = ['pabench', *sys.argv[1:]]\nimport pabench.__main__ as m\n"
        "try: code = m.main()\nexcept SystemExit as e: code = e.code\n"
        "print('heavy:', [n for n in ('torch', 'transformers', 'triton') if n in sys.modules]); sys.exit(code)"
    )
    return pabench(*args, code=code)
