"""The environment names what a result depends on, and nothing that identifies the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from pabench import environment


def test_it_names_versions_and_no_host_or_path(repo):
    text = environment.collect("cpu").model_dump_json()
    assert platform.python_version() in text
    assert str(repo) not in text
    assert os.path.expanduser("~") not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text


@pytest.mark.parametrize(
    ("device", "interpret", "mode"),
    [("cpu", "1", "interpreter"), ("cuda", "1", "interpreter"), ("cuda", "0", "gpu"), ("cpu", "", "none")],
)
def test_how_triton_runs(monkeypatch, device, interpret, mode):
    monkeypatch.setattr(environment, "installed", lambda _: "3.9.0")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert environment.triton_mode(device) == mode


@pytest.mark.parametrize(
    ("device", "given", "after"),
    [("cpu", None, "1"), ("cpu", "0", "0"), ("cuda:0", None, None), ("cuda:0", "1", "1")],
)
def test_the_interpreter_is_chosen_on_a_cpu_unless_the_user_chose(monkeypatch, device, given, after):
    monkeypatch.setenv("TRITON_INTERPRET", "x")  # so that the value is restored after the test
    if given is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", given)
    environment.use_interpreter_without_gpu(device)
    assert os.environ.get("TRITON_INTERPRET") == after


def test_without_triton_there_is_no_mode(monkeypatch):
    monkeypatch.setattr(environment, "installed", lambda _: None)
    assert environment.triton_mode("cuda") == "none"


def test_git_state_is_none_where_there_is_no_repository(tmp_path):
    assert environment.git_state(tmp_path).model_dump() == {"sha": None, "dirty": None}


def test_git_state_is_none_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_state(tmp_path).sha is None


def test_git_state_follows_the_working_tree(tmp_path):
    def git(*args):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *args], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-qm", "x")
    clean = environment.git_state(tmp_path)
    (tmp_path / "f").write_text("2")
    assert (len(clean.sha), clean.dirty, environment.git_state(tmp_path).dirty) == (40, False, True)


def test_collecting_imports_no_torch():
    code = "import sys; from pabench.environment import collect; collect(); sys.exit('torch' in sys.modules)"
    path = os.pathsep.join(p for p in sys.path if p)
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0
