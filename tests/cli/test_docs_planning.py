"""docs/planning.md: every command in it runs, and those shown with output give that output."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app
from tests.conftest import REPO

BLOCKS = re.findall(r"```\n(\$ .*?)\n```", (REPO / "docs" / "planning.md").read_text(), re.DOTALL)
EXAMPLES = [
    (command, shown.strip("\n"))
    for block in BLOCKS
    for command, shown in re.findall(r"^\$ (pabench .*)\n?((?:(?!^\$ ).*\n?)*)", block, re.MULTILINE)
]


def test_there_are_examples_with_and_without_output():
    assert {bool(shown) for _, shown in EXAMPLES} == {True, False}
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_gives_what_is_shown(command, shown, monkeypatch):
    monkeypatch.chdir(REPO)
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, shlex.split(command)[1:])
    assert result.exit_code == (3 if "error: " in shown else 0)
    if shown:
        told = "\n".join(line.rstrip() for line in (result.stdout + result.stderr).splitlines())
        assert told == shown
