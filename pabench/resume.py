"""Which run `--resume` goes on with, and the lock that keeps two processes out of one run folder. No torch."""

from __future__ import annotations

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from pabench.errors import CannotJudge
from pabench.results import RunFolder
from pabench.stored import HEADER_FILE, load_header


def claim(folder: Path) -> BaseFileLock:
    """Lock a run folder for this process. Raises ``Timeout`` if another one writes it; a killed one holds no lock."""
    lock = FileLock(folder / ".lock")
    lock.acquire(timeout=0)
    return lock


def find_unfinished(root: Path, config_hash: str) -> tuple[RunFolder, BaseFileLock] | None:
    """The newest unfinished run below ``root`` of the same configuration that nobody writes any more, locked."""
    for file in sorted(root.glob(f"*/{HEADER_FILE}"), reverse=True):
        try:
            header = load_header(file)
        except CannotJudge:  # another tool's file, or one of an older schema: not ours to go on with
            continue
        if header.run.config_hash == config_hash and header.summary.verdict in ("running", "interrupted"):
            try:
                lock = claim(file.parent)
            except Timeout:
                continue
            return RunFolder.resume(file.parent, config_hash), lock
    return None
