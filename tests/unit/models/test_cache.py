import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pabench.errors import ExecutionError, UsageError
from pabench.models.cache import build_once, cache_root, cached

BUILDER = """
import os, signal, sys, time
from pabench.models.cache import build_once

def build(into):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (into / "half").write_text("half")
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    (into / "whole").write_text("whole")

print(build_once("fake/conversion", build))
"""


def builder(log: Path, mood: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(log), mood], stdout=subprocess.PIPE, text=True)


def leftovers(cache: Path) -> list[Path]:
    return [path for path in (cache / "tmp").rglob("*") if path.is_file() and path.suffix != ".lock"]


def write_whole(into: Path) -> None:
    (into / "whole").write_text("whole")


def test_the_environment_names_the_cache(cache):
    assert cache_root() == cache


def test_the_default_is_the_platforms_cache_folder(monkeypatch):
    monkeypatch.delenv("PABENCH_CACHE")
    assert cache_root().name == "pabench"


def test_an_entry_is_built_once(cache):
    builds = []
    for _ in range(2):
        entry = build_once("a/b", lambda into: (builds.append(into), write_whole(into)))
    assert entry == cache / "a" / "b" == cached("a/b")
    assert len(builds) == 1
    assert (entry / "whole").is_file()
    assert leftovers(cache) == []


def test_two_processes_build_once_and_both_get_the_whole_entry(cache, tmp_path):
    processes = [builder(tmp_path / "log", "work") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [str(cache / "fake/conversion")] * 2
    assert (tmp_path / "log").read_text() == "built\n"
    assert (cache / "fake/conversion/whole").is_file()


def test_a_killed_builder_leaves_nothing_broken(cache, tmp_path):
    killed = builder(tmp_path / "log", "die")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert cached("fake/conversion") is None
    assert leftovers(cache) != []
    entry = build_once("fake/conversion", write_whole)
    assert (entry / "whole").is_file()
    assert not (entry / "half").exists()
    assert leftovers(cache) == []


def test_an_exception_between_build_and_rename_leaves_no_entry(cache, monkeypatch):
    def fail(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            build_once("a", write_whole)
    assert cached("a") is None
    assert leftovers(cache) == []
    assert build_once("a", write_whole).is_dir()


def test_a_damaged_entry_is_built_again(cache):
    def is_whole(entry: Path) -> bool:
        return (entry / "whole").is_file()

    (build_once("a", write_whole) / "whole").unlink()
    assert cached("a", is_whole) is None
    assert is_whole(build_once("a", write_whole, is_whole=is_whole))
    assert leftovers(cache) == []


def test_sweeping_one_entry_leaves_another_ones_builder_alone(cache):
    def build_other(into: Path) -> None:
        write_whole(build_once("b", write_whole))
        assert into.is_dir()

    assert build_once("a", build_other).is_dir()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O: No space left on device")]
)
def test_a_full_disk_is_an_execution_error(cache, error):
    def build(into: Path) -> None:
        raise error

    with pytest.raises(ExecutionError, match=r"no disk space left in the cache .*; free some, or set PABENCH_CACHE"):
        build_once("a", build)
    assert cached("a") is None
    assert leftovers(cache) == []


def test_too_little_space_is_said_before_anything_is_fetched(cache):
    with pytest.raises(
        ExecutionError, match=r"GB free but 1000000000.0 GB are needed; free some, or set PABENCH_CACHE"
    ):
        build_once("a", lambda into: pytest.fail("built"), needed_bytes=10**18)


def test_a_read_only_cache_is_a_usage_error(cache, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match=r"cannot be written \(Read-only file system\); set PABENCH_CACHE to a folder"):
        build_once("a", write_whole)


def test_a_read_only_cache_serves_what_it_holds(cache, monkeypatch):
    entry = build_once("a", write_whole)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: pytest.fail("wrote to the cache"))
    assert build_once("a", write_whole) == entry


def test_a_file_in_place_of_the_cache_is_a_usage_error(cache):
    cache.write_text("not a folder")
    with pytest.raises(UsageError, match="set PABENCH_CACHE to a folder that can be written"):
        build_once("a", write_whole)


def test_any_other_error_of_the_builder_passes(cache):
    def build(into: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once("a", build)
