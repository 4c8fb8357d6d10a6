"""A kernel that dies, hangs or breaks its process costs the cases it does it in, and is told apart from the others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

DYING = Path(__file__).parent.parent / "faulty" / "dying.py"
STRUCK, SPARED = "q1s17", "q1s16"  # the broken kernels break at 17 tokens
OPTIONS = ["--dtype", "fp32", "--probe", "iid", "-q", "--json"]


def run(tmp_path, kernels, *options, specs=f"{STRUCK},{SPARED}"):
    arguments = ["run", "kernels", "-k", kernels, "--batch-spec", specs, "-o", str(tmp_path), *OPTIONS, *options]
    result = CliRunner().invoke(app, arguments)
    assert result.stdout, result.stderr
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("function", "status", "reason", "words"),
    [
        (
            "segfaults",
            "ERROR",
            "segfault",
            "the kernel's process died: SIGSEGV (segmentation fault) in layer 0, decode",
        ),
        ("exits_hard", "ERROR", "exited", "the kernel ended its process with exit status 0 in layer 0, decode"),
        ("aborts", "ERROR", "abort", "the kernel's process died: SIGABRT (abort) in layer 0, decode"),
        ("is_killed", "ERROR", "out_of_memory", "SIGKILL (killed from outside, most likely because memory ran out)"),
        ("hangs", "ERROR", "hung", "hung: no sign of life for 1 s in layer 0, decode"),
        ("closes_every_pipe", "ERROR", "lost", "the kernel closed the pipe through which its process reports"),
        ("raises", "ERROR", "crash", "ZeroDivisionError"),
        ("raises_a_base_exception", "ERROR", "crash", "Odd: planted"),
        ("raises_system_exit", "ERROR", "crash", "SystemExit: 0"),
        ("raises_keyboard_interrupt", "ERROR", "crash", "KeyboardInterrupt"),
        ("writes_into_the_cache", "FAIL", "contract", "wrote into its input 'value_cache'"),
        ("wrong_shape", "FAIL", "contract", "must return a tensor [1, 6, 64] of torch.float32 on cpu, got [1, 1, 64]"),
        ("wrong_dtype", "FAIL", "contract", "got [1, 6, 64] of torch.float64"),
        ("wrong_device", "FAIL", "contract", "of torch.float32 on meta"),
    ],
)
def test_each_break_has_its_own_status_word_and_sentence(tmp_path, function, status, reason, words):
    code, run_json = run(tmp_path, f"{DYING}:{function},torch_paged", "--hang-timeout", "1")
    by = {(c["kernel"], c["batch_spec"].rpartition(":")[2]): c for c in run_json["cases"]}
    struck = by.pop((f"dying.py:{function}", STRUCK))
    assert (struck["status"], struck["reason"]) == (status, reason)
    assert words in struck["message"]
    assert [c["status"] for c in by.values()] == ["PASS"] * 3
    assert code == (4 if status == "ERROR" else 1)
    assert run_json["summary"]["exit_code"] == code


@pytest.mark.parametrize("function", ["segfaults", "aborts", "hangs"])
def test_the_line_it_happened_at_is_named(tmp_path, function):
    _, run_json = run(tmp_path, f"{DYING}:{function}", "--hang-timeout", "1", specs=STRUCK)
    lines = DYING.read_text().splitlines()
    at = run_json["cases"][0]["message"].rpartition("at dying.py:")[2]
    assert at.endswith(f"in {function}")
    number = int(at.partition(" ")[0])
    assert any(f"def {function}" in line for line in lines[number - 4 : number])


def test_a_kernel_that_hangs_is_given_two_cases_and_no_more(tmp_path):
    code, run_json = run(tmp_path, f"{DYING}:hangs", "--hang-timeout", "1", "--probe", "count,iid,poison", specs=STRUCK)
    assert code == 4
    assert [c["reason"] for c in run_json["cases"]] == ["hung", "hung", "not_run"]
    assert "not run: dying.py:hangs hung in 2 earlier cases" in run_json["cases"][2]["message"]


@pytest.mark.parametrize("function", ["reuses_the_first_plan", "reuses_the_larger_plan"])
def test_a_failure_that_a_fresh_process_does_not_have_is_plan_reuse(tmp_path, function):
    code, run_json = run(tmp_path, f"{DYING}:{function}", specs="plan-larger,plan-smaller")
    assert code == 1
    cases = {c["batch_spec"].partition(":")[0]: c for c in run_json["cases"] if c["probe"] == "iid"}
    assert cases["plan-larger"]["status"] == "PASS"
    assert cases["plan-smaller"]["status"] == "FAIL"
    assert cases["plan-smaller"]["diagnosis"]["fault"] == "plan_reuse"
    assert cases["plan-smaller"]["message"].startswith("plan_reuse: state left over from earlier calls leaks into")
    assert "off the fp64 oracle" in cases["plan-smaller"]["message"]
    assert [d["fault"] for d in run_json["diagnoses"]] == ["plan_reuse"]


def test_a_plain_fault_is_not_blamed_on_earlier_calls(tmp_path):
    _, run_json = run(tmp_path, f"{DYING.parent / 'kernels.py'}:zeros", specs="plan-larger,plan-smaller")
    assert {c["diagnosis"]["fault"] for c in run_json["cases"]} == {"unknown"}


def test_in_the_model_check_the_layer_and_phase_are_named_and_other_kernels_judged(tmp_path):
    (tmp_path / "k.py").write_text(
        "import ctypes\nfrom pabench_kernels import get_kernel\n"
        "def f(batch):\n"
        "    if batch.max_query_len == 1:\n"
        "        ctypes.string_at(0)\n"
        "    return get_kernel('torch_paged')(batch)\n"
    )
    arguments = ["run", "smoke", "-m", "tiny-llama", "-k", f"{tmp_path}/k.py:f,torch_paged", "--dtype", "fp32,bf16"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "o"), "--json", "-q"])
    cases = json.loads(result.stdout)["cases"]
    assert result.exit_code == 4
    assert [c["reason"] for c in cases if c["kernel"] == "k.py:f"] == ["segfault"] * 2
    assert all("in layer 0, decode at k.py:5 in f" in c["message"] for c in cases if c["kernel"] == "k.py:f")
    assert {c["status"] for c in cases if c["kernel"] == "torch_paged"} <= {"PASS", "NEAR_TIE"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", "the kernel's process died: SIGSEGV (segmentation fault) at k.py:1"),
        ("import os; os._exit(3)", "the kernel ended its process with exit status 3"),
        ("while True: pass", "hung: no sign of life for 2 s at k.py:1"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def g(batch): ...", "no function 'f'; its functions are: g"),
    ],
)
def test_a_file_that_does_not_survive_its_import_is_one_sentence(tmp_path, body, words):
    (tmp_path / "k.py").write_text(body + "\n")
    arguments = ["run", "kernels", "-k", f"{tmp_path}/k.py:f", "-o", str(tmp_path / "o"), "--hang-timeout", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "o").exists()


def test_in_process_judges_the_same(tmp_path):
    both = [run(tmp_path / flag, "torch_paged", *([flag] if flag != "x" else [])) for flag in ("--in-process", "x")]
    for code, run_json in both:
        assert code == 0
        for case in run_json["cases"]:
            case.pop("duration_s")
    assert both[0][1]["cases"] == both[1][1]["cases"]


def test_the_peak_of_memory_is_that_of_the_children_too(tmp_path):
    (tmp_path / "hog.py").write_text(
        "import torch\nfrom pabench_kernels import get_kernel\n"
        "def f(batch):\n"
        "    torch.ones(150_000_000)\n"  # 600 MB of fp32
        "    return batch.query\n"
    )
    peaks = [
        run(tmp_path / "o", kernel, specs=SPARED)[1]["run"]["peak_rss_bytes"]
        for kernel in ("torch_paged", f"{tmp_path}/hog.py:f")
    ]
    assert peaks[1] - peaks[0] > 500e6


def test_another_environment_than_the_fork_servers_is_heeded(tmp_path, monkeypatch):
    """What torch and triton read when they are imported needs a child that imports them itself."""
    (tmp_path / "k.py").write_text(
        "import os\nfrom pabench_kernels import get_kernel\n"
        "def f(batch):\n"
        "    raise RuntimeError(os.environ['OMP_WAIT_POLICY'])\n"
    )
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    _, run_json = run(tmp_path / "o", f"{tmp_path}/k.py:f", "--probe", "count", specs=SPARED)
    assert "RuntimeError: active" in run_json["cases"][0]["message"]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_no_child_outlives_its_parent_whatever_the_kernel_does(tmp_path, end):
    shutil.copy(DYING, tmp_path)
    shutil.copy(DYING.parent / "kernels.py", tmp_path)
    command = [sys.executable, "-m", "pabench", "run", "kernels", "-k", "dying.py:hangs_with_the_lock"]
    command += ["--batch-spec", STRUCK, "-o", "out", *OPTIONS]
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", heed, *command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "pid").exists() and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.05)
            time.sleep(0.2)
            child = int((tmp_path / "pid").read_text())
            assert alive(child)
            process.send_signal(end)
            process.wait(30)
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
    assert process.returncode == (130 if end == signal.SIGINT else -end)
