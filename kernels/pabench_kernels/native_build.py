"""C++ sources compiled on first use with the system's compiler, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fPIC",
    "-shared",
    "-pthread",
)
NATIVE = "-march=native"  # what runs here may not run elsewhere: the CPU's features are part of the cache's key
TIMEOUT_S = 300
NO_COMPILER = "no C++ compiler (install g++ or clang++, or set CXX)"


class BuildError(Exception):
    """No library could be built. The text is one sentence for the user."""


def build(source: Path) -> Path:
    """The shared library of a C++ source file and the headers beside it, compiled unless the cache has it.

    The library's name holds a digest of what it was built from (sources, compiler, flags, this CPU's features) and one
    of its own bytes, so that a library that was cut off is built anew. It appears by one rename: processes that build
    at the same time do the work twice and disturb nobody. Raises ``BuildError``.
    """
    compiler = find_compiler()
    folder = cache_dir()
    stem = f"{source.stem}-{_key(source, compiler)}"
    try:
        for found in sorted(folder.glob(f"{stem}-*.so")):
            if found.stem == f"{stem}-{_digest(found.read_bytes())}":
                return found
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{source.stem}-", suffix=".tmp", dir=folder)
    except OSError as error:
        raise BuildError(
            f"the cache {folder} cannot be used ({error.strerror}); set PABENCH_CACHE to a folder"
        ) from error
    os.close(handle)
    fresh = Path(name)
    try:
        _compile(source, compiler, fresh)
        library = folder / f"{stem}-{_digest(fresh.read_bytes())}.so"
        fresh.chmod(0o755)
        fresh.replace(library)
    except OSError as error:
        raise BuildError(f"{source.name} could not be compiled into {folder}: {error}") from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return library


def cache_dir() -> Path:
    """``native`` in ``$PABENCH_CACHE``, else in the user's cache folder of this platform."""
    if override := os.environ.get("PABENCH_CACHE"):
        return Path(override).expanduser().absolute() / "native"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pabench" / "native"


def find_compiler() -> list[str]:
    """The compiler's command: ``$CXX``, which may hold options, else the first that is installed.

    Raises ``BuildError`` where there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if (path := shutil.which(command[0])) is not None:
            return [path, *command[1:]]
    if chosen:
        raise BuildError(f"no C++ compiler: CXX names '{chosen[0]}', which is not installed")
    raise BuildError(NO_COMPILER)


def _compile(source: Path, compiler: list[str], target: Path) -> None:
    for flags in ((NATIVE, *FLAGS), FLAGS):  # not every compiler knows the CPU it runs on
        command = [*compiler, *flags, str(source), "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler[0]} took more than {TIMEOUT_S} s to compile {source.name}") from error
        if done.returncode == 0 and target.stat().st_size > 0:
            return
    said = next((line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()), "it said nothing")
    raise BuildError(f"{compiler[0]} cannot compile {source.name} (exit status {done.returncode}): {said}")


def _key(source: Path, compiler: list[str]) -> str:
    binary = Path(compiler[0]).resolve()
    state = binary.stat()
    parts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts += [shlex.join([str(binary), *compiler[1:], NATIVE, *FLAGS]).encode()]
    parts += [f"{state.st_size} {state.st_mtime_ns}".encode(), _cpu().encode()]
    return _digest(b"\0".join(parts))


def _cpu() -> str:
    """What compiled code may depend on: architecture and instruction sets."""
    lines: list[str] = []
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines = sorted(
            {line for line in text.splitlines() if line.startswith(("flags", "Features", "isa", "model name"))}
        )
    return "\n".join([sys.platform, platform.machine(), *(lines or [platform.processor()])])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
