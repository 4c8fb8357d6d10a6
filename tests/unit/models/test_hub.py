import threading
import time
import urllib.error
import urllib.request

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pabench.errors import CannotJudge, UsageError
from pabench.models import hub


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A fake hub: `snapshot_download` gives this folder."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(folder))
    return folder


def fail_with(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_users_offline_switch_is_honoured(monkeypatch, value, offline):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub.hub_offline() is offline


def test_a_hub_that_hangs_costs_no_more_than_the_check(monkeypatch):
    released, ended = threading.Event(), threading.Event()

    def hang(*args, **kwargs):
        released.wait(30)
        ended.set()
        raise OSError

    monkeypatch.setattr(hub, "_CHECK_S", 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", hang)
    start = time.monotonic()
    assert not hub.hub_answers()
    assert time.monotonic() - start < 10
    released.set()
    assert ended.wait(10)


def test_an_unreachable_hub_does_not_answer(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not hub.hub_answers()


def test_a_refusal_is_an_answer(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.HTTPError("url", 403, "no", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert hub.hub_answers()


def test_a_partial_snapshot_is_not_in_the_cache(snapshot):
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenizer.json").write_text("{}")
    assert hub.in_hub_cache("org/name") is None
    (snapshot / "model.safetensors").touch()
    assert hub.in_hub_cache("org/name") == snapshot


def test_an_absent_snapshot_is_not_in_the_cache(monkeypatch):
    fail_with(monkeypatch, LocalEntryNotFoundError("nothing"))
    assert hub.in_hub_cache("org/name") is None


def test_a_model_without_safetensors_is_named(snapshot):
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"'org/name' on the hub has no \*.safetensors; only models saved as"):
        hub.download("org/name")


def test_a_broken_connection_is_named(monkeypatch):
    fail_with(monkeypatch, ConnectionError("reset by peer"))
    with pytest.raises(CannotJudge, match=r"'org/name' could not be fetched.*reset by peer.*check the network"):
        hub.download("org/name")
