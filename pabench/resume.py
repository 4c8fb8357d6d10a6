"""Which run `--resume` goes on with. No torch."""

from __future__ import annotations

from pathlib import Path

from pabench.errors import CannotJudge
from pabench.results import RunFolder
from pabench.stored import HEADER_FILE, load_header


def find_unfinished(root: Path, config_hash: str) -> RunFolder | None:
    """The newest unfinished run below ``root`` of the same configuration; None if there is none."""
    for file in sorted(root.glob(f"*/{HEADER_FILE}"), reverse=True):
        try:
            header = load_header(file)
        except CannotJudge:  # another tool's file, or one of an older schema: not ours to go on with
            continue
        if header.run.config_hash == config_hash and header.summary.verdict in ("running", "interrupted"):
            return RunFolder.resume(file.parent, config_hash)
    return None
