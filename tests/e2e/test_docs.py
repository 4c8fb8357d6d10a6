"""docs/judge-your-kernel.md does what it says: its code is the examples' code, its commands end as it shows."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "judge-your-kernel.md").read_text()
SHOWN = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [(command, shown) for command, shown in SHOWN if command.startswith("pabench")]
CHEAP = [(command, shown) for command, shown in COMMANDS if "--probe" in command]


def ends_as_shown(command, shown, tmp_path):
    words = shlex.split(command)[1:]
    more = ["-q", "-o", str(tmp_path)] if words[0] == "run" else []
    result = CliRunner().invoke(app, [*words, *more])
    assert result.exit_code == int(re.search(r"\(exit (\d)\)", shown)[1]), result.output
    printed = " ".join(result.stdout.split())
    verdict = re.search(r"^(?:PASS|FAIL) \(exit.*", shown, re.MULTILINE | re.DOTALL)
    if verdict is not None:
        assert " ".join(verdict[0].split()) in printed
    for fault in re.findall(r"read head \d for \d|^FAULT .*", shown, re.MULTILINE):
        assert " ".join(fault.split()) in printed


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(REPO)


def test_the_page_has_commands():
    assert len(COMMANDS) == 5
    assert len(CHEAP) == 1


@pytest.mark.parametrize(("command", "shown"), CHEAP, ids=[c for c, _ in CHEAP])
def test_a_command_ends_as_shown(command, shown, tmp_path):
    ends_as_shown(command, shown, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_every_command_ends_as_shown(command, shown, tmp_path):
    ends_as_shown(command, shown, tmp_path)


@pytest.mark.parametrize("name", ["my_kernel.py", "test_my_kernel.py"])
def test_the_code_shown_is_the_examples(name):
    assert f"```python\n{(REPO / 'docs' / 'examples' / name).read_text()}```" in PAGE


def test_the_limits_shown_can_be_set(tmp_path):
    limits = re.search(r"^my_kernel\.phases.*?(?=```)", PAGE, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "k.py").write_text(f"def my_kernel(batch): ...\n{limits}")
    arguments = ["run", "kernels", "-k", f"{tmp_path}/k.py:my_kernel", "--dtype", "fp32", "-o", str(tmp_path / "o")]
    result = CliRunner().invoke(app, [*arguments, "--batch-spec", "plain-decode,chunk-127"])
    assert result.exit_code == 3  # all of it is skipped
    printed = " ".join(result.stdout.split())
    assert "head_dim 64 (only 128)" in printed
    assert "my_kernel has no prefill phase" in printed


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (REPO / "docs" / target).exists(), target


@pytest.mark.slow
def test_the_example_test_passes(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "docs" / "examples"))
    import test_my_kernel

    test_my_kernel.test_my_kernel_gives_dense_attentions_answers()
    del sys.modules["test_my_kernel"], sys.modules["my_kernel"]
