"""Other people's packages, each in a folder of its own in the cache: pip installs them once, at pinned hashes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pabench.models.cache import build_once

REQUIREMENTS = Path(__file__).resolve().parents[2] / "third_party"
OFFLINE = ("Could not find a version that satisfies", "No matching distribution found", "Connection", "timed out")


class UnreachableError(Exception):
    """pip cannot reach an index that has the package."""


def install(name: str) -> Path:
    """The folder that holds what ``tests/third_party/<name>.txt`` names, without dependencies."""
    requirements = REQUIREMENTS / f"{name}.txt"
    pinned = requirements.read_text().split()[0].replace("==", "-")

    def build(into: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "--require-hashes", "--timeout=15", "--retries=2"]
        done = subprocess.run(
            [*command, "--target", str(into), "-r", str(requirements)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-500:]]
            raise (UnreachableError if any(word in done.stderr for word in OFFLINE) else RuntimeError)(said[-1])

    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return build_once(f"third-party/{pinned}-{python}", build)


@pytest.fixture(scope="session")
def installed() -> Callable[[str], Path]:
    """``installed("jax")``: its folder; the test is skipped, with pip's words, where no index can be reached."""
    found: dict[str, Path | str] = {}

    def get(name: str) -> Path:
        if name not in found:
            try:
                found[name] = install(name)
            except UnreachableError as error:
                found[name] = f"pip cannot fetch {name}: {error}"
        if isinstance(folder := found[name], str):
            pytest.skip(folder)
        return folder

    return get
