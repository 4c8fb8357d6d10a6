"""The Hugging Face hub: what its cache already holds, whether it answers, and a download with errors made readable."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pabench.errors import CannotJudge, PabenchError, UsageError
from pabench.models import folder
from pabench.models.notices import notice

_CHECK_S = 3.0
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
# Only the top folder: repositories keep copies in other formats below it
_FILES: dict[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    "ignore_patterns": ["*/*"],
}


def hub_offline() -> bool:
    """Whether the user has forbidden the hub (``HF_HUB_OFFLINE`` or ``TRANSFORMERS_OFFLINE``)."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_answers() -> bool:
    """Whether the hub answers within 3 s; in a thread, since a name look-up heeds no timeout."""
    answered: list[bool] = []

    def ask() -> None:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_CHECK_S).close()
            answered.append(True)
        except urllib.error.HTTPError as error:  # an answer all the same
            error.close()
            answered.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_CHECK_S)
    return bool(answered)


def in_hub_cache(hub_id: str) -> Path | None:
    """The snapshot in the hub's own cache, if it is whole: a killed download leaves a partial one there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(hub_id, local_files_only=True, **_FILES))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return snapshot if folder.is_whole(snapshot) else None


def download(hub_id: str) -> Path:
    """The snapshot of ``hub_id``. Raises ``UsageError`` if there is no such model, else ``CannotJudge`` on failure."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    notice(f"fetching {hub_id} from the Hugging Face hub")
    try:
        snapshot = Path(snapshot_download(hub_id, etag_timeout=10, **_FILES))
    except GatedRepoError as error:
        raise CannotJudge(
            f"'{hub_id}' is gated on the hub; accept its terms at huggingface.co/{hub_id} and run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UsageError(
            f"the hub has no public model '{hub_id}'; check the spelling, or run `hf auth login` if it is private"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise _explain(hub_id, error) from error
    if lacking := folder.missing_files(snapshot):
        raise UsageError(f"'{hub_id}' on the hub has no {lacking[0]}; only models saved as safetensors can be used")
    return snapshot


def _explain(hub_id: str, error: Exception) -> PabenchError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CannotJudge(
        f"'{hub_id}' could not be fetched from the hub ({reason}); "
        "check the network, or give a model folder with -m DIR"
    )
