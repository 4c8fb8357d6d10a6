"""A kernel module with one line changed: proof that a test would see the fault."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pabench_kernels


def mutated(module: str, line: str, fault: str, folder: Path) -> ModuleType:
    """``pabench_kernels.<module>`` as a new module in ``folder``, with ``line`` (it must occur once) replaced.

    Triton reads a function's source from its file, so there must be one.
    """
    assert pabench_kernels.__file__ is not None
    source = (Path(pabench_kernels.__file__).parent / f"{module}.py").read_text()
    assert source.count(line) == 1, f"{module}.py must have this once: {line}"
    name = f"{module}_mutant"
    file = folder / f"{name}.py"
    file.write_text(source.replace(line, fault))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    try:
        spec.loader.exec_module(found)
    finally:
        del sys.modules[name]
    return found
