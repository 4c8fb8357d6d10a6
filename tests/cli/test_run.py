"""`pabench run` from the outside: errors of use, what is written, interruption and resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

FAULTY = Path(__file__).parent.parent / "faulty" / "kernels.py"
TINY = ["run", "smoke", "-m", "tiny-llama", "-k", "torch_paged", "--dtype", "fp32", "-q"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-m", "tiny-lama"], 2, "unknown model 'tiny-lama'; did you mean 'tiny-llama'"),
        (["-m", "./nowhere"], 2, "nowhere"),
        (["-k", "triton_decod"], 2, "unknown kernel 'triton_decod'; did you mean 'triton_decode'"),
        (["-k", f"{FAULTY}:a/b"], 2, "'a/b' is no name of a Python function; give FILE.py:FUNCTION"),
        (["-k", f"{FAULTY}:/b"], 2, "'/b' is no name of a Python function; give FILE.py:FUNCTION"),
        (["--hang-timeout", "0"], 2, "--hang-timeout"),
        (["-k", "nowhere.py:f"], 2, "'nowhere.py' does not exist"),
        (["--dtype", "bf61"], 2, "unknown dtype 'bf61'; did you mean 'bf16'"),
        (["--kv-dtype", "int9"], 2, "unknown kv-dtype 'int9'; did you mean 'int8'"),
        (["--block-size", "0"], 2, "block_size"),
        (["--checks", "kernal"], 2, "unknown check 'kernal'"),
        (["--prompts", "nowhere.txt"], 2, "prompts file 'nowhere.txt' cannot be read"),
        (["--device", "gpu"], 2, "unknown device 'gpu'"),
        (["--on-fallback", "maybe"], 2, "maybe"),
        (["--max-new-tokens", "1"], 2, "max_new_tokens"),
        (["--nonsense"], 2, "nonsense"),
        (["-k", ""], 2, "-k was given an empty value"),
        (["-k", ","], 2, "-k was given an empty value"),
        (["--capture", "x", "--checks", "kernel"], 2, "--capture writes attention calls of model cases"),
        (["--capture", "/dev/null/x"], 2, "cannot be made a folder"),
        (["--checks", "kernel", "--batch-spec", "nowhere.json"], 2, "capture 'nowhere.json' cannot be read"),
        (["--block-size", "8", "--page-size", "16"], 2, "--block-size and --page-size are one option"),
        (["-m", "a" * 5000], 2, "unknown model 'aaaa"),
        (["-k", "a" * 5000 + ".py:f"], 2, "does not exist"),
        (["--device", "meta"], 3, "device 'meta' is not supported; use cpu"),
        (["--prompts", ""], 2, "--prompts was given an empty value"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, arguments, code, words):
    result = invoke(*TINY, "-o", str(tmp_path / "out"), *arguments)
    assert result.exit_code == code
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out/*/cases.jsonl"))


def test_an_unknown_suite_key_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "s.yaml").write_text("name: s\ndescription: d\nmodels: [tiny-llama]\nkernals: [torch_paged]\n")
    result = invoke("run", str(tmp_path / "s.yaml"))
    assert result.exit_code == 2
    assert "unknown key 'kernals'; did you mean 'kernels'" in " ".join(result.stderr.split())


def test_a_cut_off_gguf_is_one_sentence(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    result = invoke("run", "smoke", "-m", str(tmp_path / "cut.gguf"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "cut.gguf" in result.stderr


def test_a_prompt_longer_than_the_model_cannot_be_judged(tmp_path):
    (tmp_path / "long.txt").write_text("word " * 1000)
    result = invoke(*TINY, "--prompts", str(tmp_path / "long.txt"), "-o", str(tmp_path), "--json")
    assert result.exit_code == 3
    (case,) = json.loads(result.stdout)["cases"]
    assert case["status"] == "INCONCLUSIVE"
    assert "prompt 'line-1' has 5000 tokens" in case["message"]


def test_too_few_positions_judge_nothing(tmp_path):
    (tmp_path / "short.txt").write_text("Hi\n")
    result = invoke(*TINY, "--prompts", str(tmp_path / "short.txt"), "-o", str(tmp_path), "--json")
    assert result.exit_code == 3
    assert "positions were compared, 100 are needed" in json.loads(result.stdout)["cases"][0]["message"]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    result = invoke(*TINY, "-o", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "taken" in result.stderr


def test_the_record_holds_what_was_asked_and_what_ran(tmp_path):
    result = invoke(*TINY, "-o", str(tmp_path), "--seed", "3", "--json")
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    (folder,) = tmp_path.iterdir()
    stored = json.loads((folder / "run.json").read_text())
    (line,) = (folder / "cases.jsonl").read_text().splitlines()
    assert stored == {k: v for k, v in shown.items() if k != "cases"}
    assert json.loads(line) == shown["cases"][0]
    assert stored["run"]["seed"] == 3
    assert stored["run"]["config"]["kernels"] == ["torch_paged"]
    assert (stored["summary"]["verdict"], stored["summary"]["exit_code"]) == ("passed", 0)
    case = shown["cases"][0]
    assert case["execution"]["proof"] == "proved"
    assert (case["dtype"], case["kv_dtype"], case["block_size"]) == ("fp32", "fp32", 8)
    assert str(tmp_path) not in case["case_id"]


def test_the_repro_command_runs_the_same_case_again(tmp_path):
    first = json.loads(invoke(*TINY, "-o", str(tmp_path / "a"), "--json").stdout)["cases"][0]
    words = first["repro"].split()
    assert words[0] == "pabench"
    again = json.loads(invoke(*words[1:], "-o", str(tmp_path / "b"), "--json", "-q").stdout)["cases"][0]
    assert again["case_id"] == first["case_id"]
    assert again["logits"]["kld"] == first["logits"]["kld"]


def test_underscores_are_understood_too(tmp_path):
    result = invoke(*TINY, "-o", str(tmp_path), "--page_size", "4", "--json")
    assert json.loads(result.stdout)["cases"][0]["block_size"] == 4


def test_an_unsupported_dtype_of_the_model_is_skipped_and_said_so(tmp_path, monkeypatch):
    import torch

    from pabench.reference.dense import DensePath

    honest = DensePath.forced

    def overflows(self, *args, **kwargs):
        for position, row in honest(self, *args, **kwargs):
            yield position, torch.full_like(row, float("inf"))

    monkeypatch.setattr(DensePath, "forced", overflows)
    result = invoke(*TINY, "--in-process", "-o", str(tmp_path), "--json")
    (case,) = json.loads(result.stdout)["cases"]
    assert (result.exit_code, case["status"], case["reason"]) == (3, "SKIPPED", "reference_nonfinite")


def test_interrupted_keeps_what_finished_and_resumes(tmp_path):
    """Ctrl-C in the second case; --resume runs only what is missing."""
    (tmp_path / "k.py").write_text(
        "import importlib.util, os, time\n"
        f"spec = importlib.util.spec_from_file_location('faulty', {str(FAULTY)!r})\n"
        "faulty = importlib.util.module_from_spec(spec); spec.loader.exec_module(faulty)\n"
        "def slow(batch):\n"
        "    while os.path.exists('wait'):\n"
        "        open('waiting', 'w').close()\n"
        "        time.sleep(0.05)\n"
        "    return faulty.honest(batch)\n"
    )
    (tmp_path / "wait").touch()
    command = [sys.executable, "-m", "pabench", "run", "smoke", "-m", "tiny-llama", "-k", "torch_paged,./k.py:slow"]
    command += ["--dtype", "fp32", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Where the test runner itself was started with SIGINT ignored (a background job), its children would ignore it too.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    heeding = [sys.executable, "-c", heed, *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(heeding, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        try:
            deadline = time.monotonic() + 240
            while not (tmp_path / "waiting").exists() and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    (folder,) = (tmp_path / "out").iterdir()
    assert json.loads((folder / "run.json").read_text())["summary"]["verdict"] == "interrupted"
    kept = (folder / "cases.jsonl").read_text()
    assert len(kept.splitlines()) == 1

    (tmp_path / "wait").unlink()
    done = subprocess.run(
        [*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == [folder.name]
    whole = (folder / "cases.jsonl").read_text()
    assert whole.startswith(kept)
    assert len(whole.splitlines()) == 2


def test_an_honest_kernel_against_another_is_no_regression_and_a_broken_one_is(tmp_path):
    for name, kernel in (("a", "torch_paged"), ("b", f"{FAULTY}:honest"), ("c", f"{FAULTY}:zeros")):
        invoke("run", "smoke", "-m", "tiny-llama", "-k", kernel, "--dtype", "bf16", "-q", "-o", str(tmp_path / name))
    runs = {name: str(next((tmp_path / name).iterdir())) for name in "abc"}
    assert invoke("compare", runs["a"], runs["b"]).exit_code == 0
    worse = invoke("compare", runs["a"], runs["c"])
    assert worse.exit_code == 1
    assert "attention" in " ".join(worse.stdout.split())
    assert invoke("compare", str(tmp_path / "nothing"), runs["c"]).exit_code == 3


def test_two_files_of_one_name_are_refused_and_neither_is_dropped(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.py").write_text("def f(batch):\n    return batch.query * 0\n")
    kernels = f"{tmp_path}/a/k.py:f,{tmp_path}/b/k.py:f"
    result = invoke(
        "run", "smoke", "-m", "tiny-llama", "-k", kernels, "--dtype", "fp32", "-q", "-o", str(tmp_path / "out")
    )
    assert result.exit_code == 2
    assert "would both be recorded as 'k.py:f'" in " ".join(result.stderr.split())


def test_a_model_named_twice_is_judged_once(tmp_path):
    result = invoke(*TINY, "-m", "tiny-llama", "-o", str(tmp_path), "--json")
    assert (result.exit_code, len(json.loads(result.stdout)["cases"])) == (0, 1)


def test_any_exception_of_a_kernel_costs_its_case_only(tmp_path):
    (tmp_path / "odd.py").write_text("class Odd(BaseException): ...\ndef f(batch):\n    raise Odd('planted')\n")
    result = invoke(*TINY, "-k", f"{tmp_path}/odd.py:f", "-o", str(tmp_path), "--json")
    by_kernel = {c["kernel"]: c["status"] for c in json.loads(result.stdout)["cases"]}
    assert (result.exit_code, by_kernel) == (4, {"torch_paged": "PASS", "odd.py:f": "ERROR"})


def test_resume_leaves_a_run_alone_that_another_process_writes(tmp_path):
    from pabench.records import RunHeader
    from pabench.resume import claim, find_unfinished

    invoke(*TINY, "-o", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    data = json.loads((folder / "run.json").read_text())
    data["summary"] = {"verdict": "running"}
    (folder / "run.json").write_text(json.dumps(data))
    config_hash = RunHeader.model_validate(data).run.config_hash
    lock = claim(folder)
    assert find_unfinished(tmp_path, config_hash) is None
    lock.release()
    found = find_unfinished(tmp_path, config_hash)
    assert found is not None
    found[1].release()


def test_an_edited_kernel_file_is_another_configuration(tmp_path):
    file, hashes = tmp_path / "k.py", []
    for body in ("return batch.query * 0", "return batch.query * 2"):
        file.write_text(f"def f(batch):\n    {body}\n")
        result = invoke(*TINY, "-k", f"{file}:f", "-o", str(tmp_path / "o"), "--json")
        hashes.append(json.loads(result.stdout)["run"]["config_hash"])
    assert hashes[0] != hashes[1]


def test_a_kernel_that_changes_device_and_folder_costs_no_other_case(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.py").write_text(
        "import os, torch\n"
        "def f(batch):\n"
        "    torch.set_default_device('meta')\n"
        "    os.chdir('/')\n"
        "    raise RuntimeError\n"
    )
    arguments = ["-m", "tiny-llama", "-k", "k.py:f,torch_paged", "--dtype", "fp32,bf16", "-q", "-o", "out"]
    result = invoke("run", "smoke", *arguments, "--json")
    by_kernel = {(c["kernel"], c["status"]) for c in json.loads(result.stdout)["cases"] if c["kernel"] == "torch_paged"}
    assert by_kernel <= {("torch_paged", "PASS"), ("torch_paged", "NEAR_TIE")}
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_runs_of_two_seeds_cannot_be_compared(tmp_path):
    for seed in ("1", "2"):
        invoke(*TINY, "-o", str(tmp_path / seed), "--seed", seed)
    result = invoke("compare", *(str(next((tmp_path / seed).iterdir())) for seed in ("1", "2")))
    assert result.exit_code == 3
    assert "another seed is another test" in " ".join(result.stderr.split())


def test_a_reader_that_goes_away_does_not_change_the_exit_code(tmp_path):
    invoke(*TINY, "-o", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pabench", "report", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_written_below_python_does_not_reach_stdout(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import importlib.util, os, sys\n"
        f"spec = importlib.util.spec_from_file_location('faulty', {str(FAULTY)!r})\n"
        "faulty = importlib.util.module_from_spec(spec); spec.loader.exec_module(faulty)\n"
        "def f(batch):\n"
        "    os.write(1, b'RAW\\n'); os.system('echo SUB'); sys.__stdout__.write('DUNDER\\n')\n"
        "    return faulty.honest(batch)\n"
    )
    command = [sys.executable, "-m", "pabench", "run", "smoke", "-m", "tiny-llama", "-k", "loud.py:f"]
    command += ["--dtype", "fp32", "-q", "-o", "out", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["summary"]["exit_code"] == done.returncode == 0


def test_the_printed_json_fits_its_schema(tmp_path):
    import jsonschema

    shown = json.loads(invoke(*TINY, "-o", str(tmp_path), "--json").stdout)
    jsonschema.validate(shown, json.loads(invoke("schema", "json").stdout))


def test_the_repro_of_a_suite_file_names_the_file(tmp_path):
    from pabench.suite import suites_folder

    mine = tmp_path / "mine.yaml"
    mine.write_text((suites_folder() / "smoke.yaml").read_text())
    arguments = [str(mine) if word == "smoke" else word for word in TINY]
    case = json.loads(invoke(*arguments, "-o", str(tmp_path / "o"), "--on-fallback", "warn", "--json").stdout)["cases"][
        0
    ]
    assert case["repro"].startswith(f"pabench run {mine} ")
    assert case["repro"].endswith("--on-fallback warn")


def test_a_key_written_twice_is_refused(tmp_path):
    (tmp_path / "s.yaml").write_text("name: s\nmodels: [tiny-llama]\nmodels: [tiny-mqa]\n")
    result = invoke("run", str(tmp_path / "s.yaml"))
    assert result.exit_code == 2
    assert "key 'models' stands there twice" in " ".join(result.stderr.split())
