"""The house's rules: imports go one way, `kernels/` shadows nothing, the wheel holds what it should."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOL_PACKAGES = ("pabench", "typer", "rich", "transformers", "lm_eval")
CHECKED = ("pabench.cli", "pabench.runner", "pabench.checks")

# what modules of this prefix must never import, lazily either; the longest matching prefix counts
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "pabench": CHECKED,
    "pabench.__main__": (),
    "pabench.cli": (),
    "pabench.doctor": ("pabench.cli",),  # judges a small batch as a run does
    "pabench.testing": ("pabench.cli", "pabench.runner"),  # a front door beside the command line
    "pabench.runner": ("pabench.cli",),
    "pabench.selftest": ("pabench.cli", "pabench.runner"),
    "pabench.checks": ("pabench.cli", "pabench.runner"),
    "pabench.engine": CHECKED,
    "pabench.reference": CHECKED,
    "pabench.diagnose": CHECKED,
    "pabench.models": CHECKED,
    "pabench.planner": (*CHECKED, "pabench.engine", "pabench.reference", "pabench.report"),
    "pabench_kernels": TOOL_PACKAGES,
}
NO_TORCH = ("pabench.records", "pabench.results", "pabench.compare", "pabench.verdict", "pabench.environment")
PLANNER = ("pabench.planner.ask", "pabench.planner.to_json", "pabench.report.plan_table")
REPORTS = (
    "pabench.report.table",
    "pabench.report.comparison",
    "pabench.report.compile_table",
    "pabench.report.doctor",
)
TORCHLESS = (*NO_TORCH, *REPORTS, *PLANNER, "pabench.suite", "pabench.models.catalog", "pabench.compilation.run")
TORCHLESS += ("pabench.capture.meta", "pabench.checks.kernel.shapes", "pabench.diagnose.conditions")


def sources() -> Iterator[tuple[str, Path]]:
    for root, package in ((REPO, "pabench"), (REPO / "kernels", "pabench_kernels")):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(code: str) -> set[str]:
    """Full names of everything imported anywhere in the code: `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def wrong_imports(module: str, code: str) -> list[str]:
    rule = max((p for p in FORBIDDEN if inside(module, p)), key=len)
    return sorted({n for n in imports(code) for f in FORBIDDEN[rule] if inside(n, f)})


@pytest.mark.parametrize(("module", "path"), list(sources()), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_go_one_way(module, path):
    assert wrong_imports(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("pabench.diagnose.x", "from pabench.checks.kernel import case"),
        ("pabench.engine.x", "def f():\n    from pabench.checks import model"),
        ("pabench.checks.x", "from pabench import runner"),
        ("pabench.records", "import pabench.cli.app"),
        ("pabench.runner", "from pabench.cli.run import run"),
        ("pabench_kernels.x", "from rich.console import Console"),
        ("pabench_kernels.x", "if True:\n    import pabench.errors"),
    ],
)
def test_that_rule_sees_an_import_in_the_wrong_direction(module, code):
    assert wrong_imports(module, code) != []


@pytest.mark.parametrize("module", TORCHLESS)
def test_records_and_reports_load_without_torch(module):
    assert loads_torch(f"import {module}") == "False"


def test_that_check_sees_torch():
    assert loads_torch("import torch") == "True"


def loads_torch(code: str) -> str:
    script = f"import sys; sys.path[:0] = {[str(REPO), str(REPO / 'kernels')]!r}; {code}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_command_modules_import_only_typer_at_module_level():
    for path in (REPO / "pabench" / "cli").glob("*.py"):
        top = ast.Module([n for n in ast.parse(path.read_text()).body if not isinstance(n, ast.FunctionDef)], [])
        allowed = ("typer", "pabench.cli", "pabench.errors", "pabench.__version__", *sys.stdlib_module_names)
        heavy = {n for n in imports(ast.unparse(top)) - {"pabench"} if not any(inside(n, a) for a in allowed)}
        assert heavy == set(), path.name


def test_the_folder_kernels_shadows_no_package_of_that_name():
    assert not (REPO / "kernels" / "__init__.py").exists()
    script = (
        f"import sys; sys.path.insert(0, {str(REPO)!r}); import importlib.util as u; s = u.find_spec('kernels'); "
        "print(s.origin if s else None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert str(REPO) not in done.stdout, "`import kernels` finds the checkout's folder as a regular package"


def test_the_tests_do_not_live_in_kernels():
    assert list((REPO / "kernels").rglob("test_*.py")) == []


def packages_on_disk(repo: Path) -> set[str]:
    found = {"pabench.builtin_suites"}
    for root, package in ((repo, "pabench"), (repo / "kernels", "pabench_kernels")):
        for init in (root / package).rglob("__init__.py"):
            found.add(".".join(init.parent.relative_to(root).parts))
    return found


def test_the_list_of_packages_is_complete():
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages_on_disk(REPO))


def test_every_folder_with_code_is_a_package():
    for _, path in sources():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py and would be left out"


def test_that_check_sees_a_new_package(tmp_path):
    (tmp_path / "pabench" / "new").mkdir(parents=True)
    (tmp_path / "pabench" / "new" / "__init__.py").touch()
    assert packages_on_disk(tmp_path) == {"pabench.new", "pabench.builtin_suites"}


def test_direct_dependencies_are_pinned_for_ci():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {requirement_name(r) for r in [*project["dependencies"], *extras["dev"], *extras["tasks"]]}
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {line.split("==")[0].lower() for line in lines}
    assert all("==" in line for line in lines)
    assert wanted - pinned == set()


def requirement_name(requirement: str) -> str:
    for i, c in enumerate(requirement):
        if not (c.isalnum() or c in "-_."):
            return requirement[:i].lower()
    return requirement.lower()


def test_ci_calls_make_test():
    script = REPO / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


@pytest.mark.slow
def test_the_wheel_holds_code_kernels_and_suites_and_nothing_else(tmp_path):
    """Built from a copy: a build leaves folders behind whose stale modules would get into the next wheel."""
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results", "__pycache__")
    shutil.copytree(REPO, tmp_path / "copy", ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tmp_path / "copy")]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"pabench", "pabench_kernels"}
    for name in (
        "pabench/builtin_suites/quick.yaml",
        "pabench/builtin_suites/smoke.yaml",
        "pabench/builtin_suites/captured/smollm2-135m-bf16-layer15-decode.json",
        "pabench/builtin_suites/captured/smollm2-135m-bf16-layer15-decode.safetensors",
        "pabench/cli/app.py",
        "pabench_kernels/contract.py",
        "pabench_kernels/cpu_native.cpp",
        "pabench_kernels/cpu_vectors.h",
    ):
        assert name in names
    code = {str(p.relative_to(r)) for r in (REPO, REPO / "kernels") for p in r.glob("pabench*/**/*.py")}
    assert code == {n for n in names if n.endswith(".py")}
