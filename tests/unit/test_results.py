"""A run folder is made once, and nothing half-written is ever taken for whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from pabench.errors import CannotJudge, ExecutionError, UsageError
from pabench.records import dumps, jsonable
from pabench.results import RunFolder, read_run, write_atomically

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_run_is_named_by_time_commit_and_device(tmp_path):
    folder = RunFolder.create(tmp_path, device="NVIDIA H200", git_sha="abcdef0123", now=NOW)
    assert folder.run_id == "20260102T030405Z_abcdef0_nvidia-h200"
    assert RunFolder.create(tmp_path, device="cpu", now=NOW).run_id == "20260102T030405Z_nogit_cpu"


def test_two_runs_at_once_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.create(tmp_path, device="cpu", now=NOW).path, range(16)))
    assert len(set(made)) == 16
    assert all(re.search(r"_nogit_cpu(-\d+)?$", p.name) for p in made)


def test_a_finished_run_reads_back_as_it_was_written(store, make_record):
    records = [make_record("a"), make_record("b", status="FAIL")]
    header, back = read_run(store(records))
    assert back == records
    assert (header.summary.verdict, header.summary.exit_code) == ("failed", 1)


def test_a_run_can_be_named_by_folder_header_cases_or_baseline(store, make_record, tmp_path, monkeypatch):
    path = store([make_record()])
    shutil.copytree(path, tmp_path / "results/baselines/main")
    (tmp_path / "results/baselines/flat.json").write_text(dumps_with_cases(path))
    monkeypatch.chdir(tmp_path)
    for name in (
        path,
        path / "run.json",
        path / "cases.jsonl",
        "main",
        "flat",
        "results/baselines/flat.json",
        path.name,
    ):
        assert read_run(name)[1] == [make_record()], name


def dumps_with_cases(path):
    import json

    header, records = read_run(path)
    return json.dumps({**jsonable(header), "cases": [jsonable(r) for r in records]})


def test_before_the_first_case_the_header_says_running(tmp_path, make_header):
    folder = RunFolder.create(tmp_path, device="cpu")
    folder.start(make_header(run_id=folder.run_id))
    header, records = read_run(folder.path, allow_empty=True)
    assert (header.summary.verdict, header.summary.exit_code, records) == ("running", None, [])


@pytest.fixture
def running(tmp_path, make_header, make_record):
    """A run with one case on disk that never finished."""
    folder = RunFolder.create(tmp_path, device="cpu")
    folder.start(make_header(run_id=folder.run_id))
    folder.append(make_record("a"))
    return folder


@pytest.mark.parametrize("cut", [1, 20], ids=["no newline", "half a line"])
def test_a_torn_last_line_is_dropped_with_a_note(running, make_record, caplog, cut):
    line = dumps(make_record("b")) + "\n"
    with (running.path / "cases.jsonl").open("a") as f:
        f.write(line[:-cut])
    assert [r.case_id for r in read_run(running.path)[1]] == [make_record("a").case_id]
    assert "cut off and was dropped" in caplog.text


def test_a_torn_line_in_the_middle_is_an_error(running, make_record):
    cases = running.path / "cases.jsonl"
    whole = cases.read_text()
    cases.write_text(whole[:50] + "\n" + dumps(make_record("b")) + "\n")
    with pytest.raises(CannotJudge, match=r"line 1 of .* is damaged"):
        read_run(running.path)


def test_resume_cuts_a_torn_line_off_and_goes_on_behind_it(running, make_record, make_header):
    cases = running.path / "cases.jsonl"
    whole = cases.read_bytes()
    cases.write_bytes(whole + b'{"case_id": "half')
    resumed = RunFolder.resume(running.path, "c0ffee")
    assert resumed.finished == {make_record("a").case_id}
    assert cases.read_bytes() == whole
    resumed.append(make_record("b"))
    resumed.finish(make_header(resumed.records, run_id=resumed.run_id))
    assert [r.case_id for r in read_run(running.path)[1]] == [make_record("a").case_id, make_record("b").case_id]


def test_resume_refuses_another_configuration(running):
    with pytest.raises(UsageError, match="another configuration"):
        RunFolder.resume(running.path, "decaf")


def test_a_case_is_recorded_once(running, make_record):
    with pytest.raises(ValueError, match="already has a record"):
        running.append(make_record("a"))


def test_a_disk_that_fills_up_leaves_only_whole_lines(running, make_record, monkeypatch):
    before = (running.path / "cases.jsonl").read_bytes()
    real = os.write

    def fills_up(fd, data):
        if len(data) > 10:
            return real(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    def nearly(fd, data):
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        return fills_up(fd, data)

    monkeypatch.setattr(os, "write", nearly)
    with pytest.raises(ExecutionError, match=r"No space left.*--resume"):
        running.append(make_record("b"))
    assert (running.path / "cases.jsonl").read_bytes() == before
    assert make_record("b").case_id not in running.finished


def test_a_failed_rewrite_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    target = tmp_path / "run.json"
    write_atomically(target, "old")

    def no_space(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_refused_at_the_start(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 100, 0))
    with pytest.raises(UsageError, match="full disk"):
        RunFolder.create(tmp_path, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_a_file_is_refused_at_the_start(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="cannot write to the output folder"):
        RunFolder.create(tmp_path / "out", device="cpu")


def test_a_read_only_output_folder_is_refused_at_the_start(tmp_path, monkeypatch, make_header):
    folder = RunFolder.create(tmp_path, device="cpu")

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", read_only)
    with pytest.raises(UsageError, match="Read-only file system"):
        folder.start(make_header(run_id=folder.run_id))


def test_a_missing_run_cannot_be_judged_and_close_names_are_offered(tmp_path, monkeypatch):
    (tmp_path / "results/baselines/release").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotJudge, match="did you mean 'release'"):
        read_run("relaese")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ('{"schema_version": 1, "run"', "cut off"),
        ("[]", "not a pabench run"),
        ('{"hello": 1}', "not a pabench run"),
        ('{"schema_version": 99}', "has schema_version 99"),
        ('{"schema_version": 1}', "run: Field required"),
    ],
)
def test_a_header_that_is_none_cannot_be_judged(tmp_path, text, complaint):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CannotJudge, match=complaint):
        read_run(tmp_path)


def test_a_folder_without_a_header_is_no_run(tmp_path):
    with pytest.raises(CannotJudge, match=r"holds no run\.json"):
        read_run(tmp_path)


def test_a_finished_run_that_lost_cases_cannot_be_judged(store, make_record):
    path = store([make_record("a"), make_record("b")])
    cases = path / "cases.jsonl"
    cases.write_text(cases.read_text().splitlines(keepends=True)[0])
    with pytest.raises(CannotJudge, match="speaks of 2 cases but 1 are stored"):
        read_run(path)


def test_a_run_without_a_finished_case_cannot_be_judged(store):
    with pytest.raises(CannotJudge, match="no finished case"):
        read_run(store([]))


def test_a_line_that_is_no_record_names_the_field(running):
    with (running.path / "cases.jsonl").open("a") as f:
        f.write('{"case_id": "x"}\n')
    with pytest.raises(CannotJudge, match=r"line 2 .* is not a record: pair_key"):
        read_run(running.path)
