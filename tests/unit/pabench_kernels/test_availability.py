"""What can run here is found without importing it, and asking for what cannot is no crash."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app
from pabench_kernels import availability
from pabench_kernels.availability import missing, package_folder, why_not
from pabench_kernels.contract import ALL_PHASES, KernelSpec, Package
from pabench_kernels.registry import kernel_specs

ABSENT = ("vllm_cpu", "jax_pallas", "openvino")


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(availability, "package_folder", lambda module: None)


def test_an_installed_package_is_no_reason():
    assert missing(Package("pytest", "pytest")) == ""


def test_a_missing_package_says_how_to_get_it():
    assert missing(Package("no_such_package", "such==1")) == (
        "package no_such_package is not installed (pip install such==1)"
    )


def test_another_build_under_the_same_name_is_told_apart():
    reason = missing(Package("pytest", "other-pytest", "_C*.so"))
    assert reason == "the installed package pytest is another build: it holds no _C*.so (pip install other-pytest)"


def test_a_package_is_found_without_importing_it():
    assert package_folder("json") is not None
    assert package_folder("no_such_package") is None


def test_a_missing_gpu_is_a_reason(monkeypatch):
    monkeypatch.setattr(availability, "_DEVICE_FILES", {"nvidia": ("/no/such",), "amd": ("/dev/null",)})
    spec = KernelSpec("x", "x:y", ALL_PHASES, "", gpu="nvidia")
    assert why_not(spec) == ["needs an NVIDIA GPU, and this machine has none"]
    assert why_not(KernelSpec("x", "x:y", ALL_PHASES, "", gpu="any")) == []


def test_a_missing_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not(kernel_specs()["cpu_native"]) == [
        "no C++ compiler: CXX names 'no-such-compiler', which is not installed"
    ]


@pytest.mark.usefixtures("nothing_installed")
def test_the_list_says_what_is_missing():
    rows = {
        row["name"]: row for row in json.loads(CliRunner().invoke(app, ["list", "kernels", "--json"]).stdout)["kernels"]
    }
    assert (rows["torch_paged"]["available"], rows["torch_paged"]["reason"]) == ("yes", "")
    for name in ABSENT:
        assert rows[name]["available"] == "no"
        assert "is not installed (pip install " in rows[name]["reason"]
    assert "Not here: package jax is not installed" in " ".join(
        CliRunner().invoke(app, ["list", "kernels"], env={"COLUMNS": "400"}).stdout.split()
    )


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ABSENT)
def test_asking_for_what_is_not_installed_skips_and_exits_3(name, tmp_path):
    arguments = ["run", "kernels", "-k", name, "--dtype", "fp32", "--batch-spec", "plain-decode", "--probe", "iid"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path), "--json", "-q"])
    assert result.exit_code == 3
    (case,) = json.loads(result.stdout)["cases"]
    assert case["status"] == "SKIPPED"
    assert "is not installed (pip install " in case["message"]
