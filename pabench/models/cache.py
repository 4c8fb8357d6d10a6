"""The cache folder. An entry is built in a temporary folder beside it and renamed when done: it is whole or absent."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pabench.errors import ExecutionError, PabenchError, UsageError
from pabench.models.notices import notice

ENV = "PABENCH_CACHE"


def cache_root() -> Path:
    """``$PABENCH_CACHE``, else the user's cache folder of this platform."""
    import platformdirs

    override = os.environ.get(ENV)
    return Path(override).expanduser().absolute() if override else Path(platformdirs.user_cache_dir("pabench"))


def cached(key: str, is_whole: Callable[[Path], bool] = Path.is_dir) -> Path | None:
    """The finished entry ``key``, or None. Takes no lock and writes nothing, so a read-only cache can serve."""
    entry = cache_root() / key
    return entry if entry.is_dir() and is_whole(entry) else None


def build_once(
    key: str,
    build: Callable[[Path], None],
    *,
    needed_bytes: int = 0,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """The entry ``key``, made by ``build(empty folder)`` if it is missing; other processes wait meanwhile.

    What a killed builder left behind is removed under the lock. Raises ``ExecutionError`` when the disk is full and
    ``UsageError`` when the cache cannot be written; what ``build`` raises passes, and leaves nothing behind.
    """
    if (entry := cached(key, is_whole)) is not None:
        return entry
    root = cache_root()
    entry, temporary = root / key, root / "tmp" / key.replace("/", "--")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(parents=True, exist_ok=True)
        with _locked(root / "tmp" / f"{temporary.name}.lock", key):
            if (built := cached(key, is_whole)) is not None:
                return built
            _sweep(temporary)
            _require_space(root, needed_bytes)
            fresh = temporary / uuid.uuid4().hex
            fresh.mkdir()
            try:
                build(fresh)
                if entry.exists():  # damaged: is_whole refused it
                    entry.rename(temporary / uuid.uuid4().hex)
                fresh.rename(entry)
            finally:
                _sweep(temporary)
    except Exception as error:
        if (explained := _explain(error, root)) is None:
            raise
        raise explained from error
    return entry


def _explain(error: Exception, root: Path) -> PabenchError | None:
    """A sentence for a full disk or a cache that cannot be written; None for any other error."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):  # safetensors' own error type
        return ExecutionError(f"no disk space left in the cache {root}; free some, or set {ENV} to another folder")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return UsageError(
            f"the cache {root} cannot be written ({os.strerror(number)}); set {ENV} to a folder that can be written"
        )
    return None


@contextmanager
def _locked(path: Path, key: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        notice(f"another process is preparing {key}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(folder: Path) -> None:
    for leftover in folder.iterdir():
        shutil.rmtree(leftover, ignore_errors=True)


def _require_space(root: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise ExecutionError(
            f"the cache {root} has {free_bytes / 1e9:.1f} GB free but {needed_bytes / 1e9:.1f} GB are needed; "
            f"free some, or set {ENV} to a folder on another disk"
        )
