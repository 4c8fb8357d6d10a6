"""Whether a registered kernel can run here, found without importing it, its library or torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pabench_kernels.contract import KernelSpec, Package
from pabench_kernels.native_build import BuildError, find_compiler

_DEVICE_FILES = {"nvidia": ("/dev/nvidiactl", "/dev/dxg"), "amd": ("/dev/kfd",)}


def why_not(spec: KernelSpec) -> list[str]:
    """Reasons why ``spec`` cannot run on this machine, for the user; empty if nothing is known to stand against it."""
    reasons = [reason for package in spec.requires if (reason := missing(package))]
    if spec.compiler:
        try:
            find_compiler()
        except BuildError as error:
            reasons.append(str(error))
    if spec.gpu and not has_gpu(spec.gpu):
        kind = {"nvidia": "an NVIDIA GPU", "amd": "an AMD GPU", "any": "a GPU"}[spec.gpu]
        reasons.append(f"needs {kind}, and this machine has none")
    return reasons


def missing(package: Package) -> str:
    """Why the package cannot be used; empty if it is installed."""
    hint = f"(pip install {package.install})"
    folder = package_folder(package.module)
    if folder is None:
        return f"package {package.module} is not installed {hint}"
    if package.file and not any(folder.glob(package.file)):
        return f"the installed package {package.module} is another build: it holds no {package.file} {hint}"
    return ""


def package_folder(module: str) -> Path | None:
    """Where a top-level package lies, without importing it."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None if found is None or found.origin is None else Path(found.origin).parent
    return Path(next(iter(found.submodule_search_locations)))


def has_gpu(kind: str) -> bool:
    """Whether a GPU's driver is there: "nvidia", "amd" or "any"."""
    kinds = _DEVICE_FILES if kind == "any" else {kind: _DEVICE_FILES[kind]}
    return any(Path(file).exists() for files in kinds.values() for file in files)
