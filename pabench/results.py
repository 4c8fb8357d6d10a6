"""Run folders: made once, written so that a crash at any moment leaves nothing that can be taken for whole.

``cases.jsonl`` grows by one flushed line per case; ``run.json`` is replaced atomically. Reading is in
``pabench.stored``; ``read_run`` is re-exported here.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from pabench.errors import ExecutionError, UsageError
from pabench.records import Record, RunHeader, dumps
from pabench.stored import CASES_FILE, HEADER_FILE, load_header, parse_cases, read_run, resolve_run

__all__ = ["DEFAULT_ROOT", "RunFolder", "read_run", "write_atomically"]

DEFAULT_ROOT = Path("results")
_MIN_FREE_BYTES = 1 << 20  # a run writes a few hundred KiB at most


class RunFolder:
    """The folder of one run. ``finished`` holds the case_ids that need not run again."""

    def __init__(self, path: Path, records: list[Record] | None = None, header: RunHeader | None = None) -> None:
        self.path = path
        self.records = list(records or [])
        self.header = header
        self.finished = {r.case_id for r in self.records}

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, root: Path, *, device: str, git_sha: str | None = None, now: datetime | None = None) -> RunFolder:
        """Make ``root/<UTC yyyymmddThhmmssZ>_<sha7 or nogit>_<device>[-n]``; no two calls ever get the same one.

        Raises UsageError where the folder cannot be written or the disk is full.
        """
        stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
        stem = f"{stamp}_{(git_sha or 'nogit')[:7]}_{slug}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(root).free < _MIN_FREE_BYTES:
                raise UsageError(f"the output folder '{root}' is on a full disk: free some space or choose another -o")
            path, n = root / stem, 1
            while True:
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    n += 1
                    path = root / f"{stem}-{n}"
        except OSError as e:
            raise UsageError(_cannot_write(root, e)) from e
        return cls(path)

    @classmethod
    def resume(cls, path: Path | str, config_hash: str) -> RunFolder:
        """Open an unfinished run to go on with it; a torn last line is cut off.

        Raises UsageError where the run was made with another configuration, CannotJudge where there is no such run.
        """
        folder = resolve_run(path).parent
        header = load_header(folder / HEADER_FILE)
        if header.run.config_hash != config_hash:
            raise UsageError(
                f"cannot resume '{folder}': it was made with another configuration "
                f"({header.run.config_hash[:12]}, this one is {config_hash[:12]}); give the same options, or start anew"
            )
        cases = folder / CASES_FILE
        records: list[Record] = []
        if cases.exists():
            records, whole_bytes = parse_cases(cases)
            try:
                os.truncate(cases, whole_bytes)
            except OSError as e:
                raise UsageError(_cannot_write(folder, e)) from e
        return cls(folder, records, header)

    def start(self, header: RunHeader) -> None:
        """Write run.json before the first case. Raises UsageError where the folder cannot be written."""
        try:
            write_atomically(self.path / HEADER_FILE, dumps(header, indent=2) + "\n")
            (self.path / CASES_FILE).touch()
        except OSError as e:
            raise UsageError(_cannot_write(self.path, e)) from e
        self.header = header

    def append(self, record: Record) -> None:
        """Add one finished case; on return it is on disk. Raises ExecutionError where it could not be written whole."""
        if record.case_id in self.finished:
            raise ValueError(f"case '{record.case_id}' already has a record")
        line = (dumps(record) + "\n").encode()
        try:
            _append_whole(self.path / CASES_FILE, line)
        except OSError as e:
            raise ExecutionError(
                f"could not store case '{record.case_id}' in '{self.path}' ({e.strerror}); "
                f"make room, then go on with --resume"
            ) from e
        self.records.append(record)
        self.finished.add(record.case_id)

    def finish(self, header: RunHeader) -> None:
        """Replace run.json by its final form."""
        try:
            write_atomically(self.path / HEADER_FILE, dumps(header, indent=2) + "\n")
        except OSError as e:
            raise ExecutionError(f"could not write '{self.path / HEADER_FILE}' ({e.strerror}); cases are kept") from e
        self.header = header


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file beside ``path``, flush it to disk, rename it. On failure ``path`` is as it was."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(text.encode())
            f.flush()
            os.fchmod(f.fileno(), 0o644)
            os.fsync(f.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _append_whole(path: Path, line: bytes) -> None:
    """Append the line and fsync; where that fails, take back the part that was written."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _cannot_write(folder: Path, e: OSError) -> str:
    return f"cannot write to the output folder '{folder}' ({e.strerror}): choose another with -o"
