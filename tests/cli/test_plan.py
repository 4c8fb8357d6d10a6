"""`pabench plan` from the outside, on the example that was worked by hand."""

import json

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app
from pabench.planner import ask
from pabench.planner.budget import Device
from tests.unit.planner.worked import GIB, MIB, write_example

CONTRACT = {
    "num_blocks",
    "usable_blocks",
    "max_tokens",
    "guaranteed_tokens",
    "bytes_per_token",
    "block_bytes",
    "devices",
    "terms",
}
DEVICE = {"name", "layers", "kv_heads", "budget_bytes", "blocks", "stranded_bytes"}


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def example(tmp_path):
    config, devices = write_example(tmp_path)
    return ("--model", config, "--devices", devices, "--weights", "loaded", "--reserve", "0")


def test_the_json_has_the_contracts_fields_and_the_worked_numbers(example):
    result = invoke(*example, "--layers", "20,12", "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(told) >= CONTRACT
    assert (told["num_blocks"], told["max_tokens"], told["bytes_per_token"]) == (6_007, 192_224, 131_072)
    assert told["block_bytes"] == 4 * MIB
    assert all(set(device) >= DEVICE for device in told["devices"])
    assert [d["layers"] for d in told["devices"]] == [20, 12]
    assert [d["budget_bytes"] // MIB for d in told["devices"]] == [18_022, 9_011]
    assert [d["blocks"] for d in told["devices"]] == [7_208, 6_007]


def test_the_terms_of_a_device_add_up_to_its_budget(example):
    for d in json.loads(invoke(*example[:4], "--json").stdout)["devices"]:
        t = d["terms"]
        spent = t["used_bytes"] + t["weight_bytes"] + t["activation_bytes"] + t["safety_bytes"]
        assert d["budget_bytes"] == t["usable_bytes"] - spent > 0
        assert min(t["weight_bytes"], t["activation_bytes"], t["safety_bytes"]) > 0


def test_a_plan_below_the_request_exits_3_with_the_numbers(example):
    result = invoke(*example, "--context", "300000", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["fits"], told["guaranteed_tokens"]) == (3, False, 209_696)
    assert "300,000 tokens need 9,375 blocks" in result.stderr
    assert "guarantee 209,696 tokens" in result.stderr


def test_exactly_what_fits_exits_0_and_one_more_token_3(example):
    assert invoke(*example, "--context", "209696").exit_code == 0
    assert invoke(*example, "--context", "209697").exit_code == 3


def test_the_table_is_good_at_80_columns(example):
    result = invoke(*example, "--context", "300000")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    words = " ".join(result.stdout.split())
    assert "131,072 bytes in all layers" in words
    assert "6,553 blocks of 32 tokens: 209,696 tokens" in words
    assert "would fit with --kv-dtype fp8" in words


def test_unknown_memory_exits_3_with_a_sentence(tmp_path, example):
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps([{"name": "g", "kind": "cuda", "total_bytes": "unknown", "used_bytes": 0}]))
    result = invoke(*example[:2], "--devices", unknown)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "the total memory of device 'g' is unknown" in result.stderr


def test_auto_asks_this_machine(example, monkeypatch):
    monkeypatch.setattr(ask, "here", lambda: [Device("cpu", "cpu", 10 * GIB, 2 * GIB)])
    told = json.loads(invoke(*example[:2], *example[4:], "--json").stdout)
    assert told["num_blocks"] == 7 * GIB // (4 * MIB)


def test_ranks_are_planned_for_the_smallest(example):
    told = json.loads(invoke(*example, "--tp", "2", "--json").stdout)
    assert (told["num_blocks"], [d["kv_heads"] for d in told["devices"]]) == (4_505, [4, 4])


def test_a_model_may_be_given_by_numbers(example):
    shape = ("--num-layers", 32, "--num-kv-heads", 8, "--head-dim", 128)
    told = json.loads(invoke(*shape, *example[2:], "--json").stdout)
    assert (told["num_blocks"], told["terms"]["model_max_length"]) == (6_553, None)


def test_a_latent_may_be_given_by_its_size(example):
    told = json.loads(invoke("--num-layers", 2, "--latent-dim", 576, *example[2:], "--json").stdout)
    assert told["bytes_per_token"] == 2 * 2 * 576


def test_page_size_and_underscores_are_understood(example):
    told = json.loads(invoke(*example, "--page_size", "16", "--kv_dtype", "fp8", "--json").stdout)
    assert told["block_bytes"] == MIB


def test_a_folder_with_a_config_is_a_model(example, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "model" / "config.json")
    told = json.loads(invoke("-m", tmp_path / "model", *example[2:], "--json").stdout)
    assert (told["model"], told["num_blocks"]) == ("model", 6_553)


def test_a_hub_id_is_found_in_the_cache(example, tmp_path, monkeypatch):
    import huggingface_hub

    known = {"org/llama": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda hub_id, file: known.get(hub_id))
    assert json.loads(invoke("-m", "org/llama", *example[2:], "--json").stdout)["num_blocks"] == 6_553
    missing = invoke("-m", "org/other", *example[2:])
    assert missing.exit_code == 3
    assert "'org/other' is not in the local cache" in missing.stderr


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mqa", "falcon-7b-shape"])
def test_a_random_built_in_is_planned_as_it_is_made(example, name):
    import torch

    from pabench.checks.memory import shape_of
    from pabench.models.load import load_model, resolve_model
    from pabench.planner.find_model import find_shape

    assert find_shape(name) == shape_of(load_model(resolve_model(name), dtype=torch.float32))


def test_a_built_in_that_was_never_fetched_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("PABENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    result = invoke("-m", "smollm2-135m")
    assert result.exit_code == 3
    assert "planning fetches nothing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "--tp 3 is impossible: 8 KV heads cannot be divided by 3"),
        (["--tp", "2", "--layers", "16,16"], "give one of them"),
        (["--layers", "20;12"], "--layers must be whole numbers with commas between, got '20;12'"),
        (["--layers", "20,11"], "must be counts that add up to 32 layers"),
        (["--kv-dtype", "fp9"], "unknown dtype 'fp9'; did you mean 'fp8'"),
        (["--reserve", "some"], "--reserve must be whole numbers"),
        (["--utilization", "2"], "--utilization must be above 0"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--block-size", "8", "--page-size", "8"], "give it once"),
        (["--devices", "nowhere.json"], "'nowhere.json' cannot be read"),
        (["-m", "nowhere.json"], "there is no file or folder 'nowhere.json'"),
        (["-m", "tiny-lama"], "unknown model 'tiny-lama'; did you mean 'tiny-llama'"),
        (["-m", "a/b/c"], "there is no file or folder 'a/b/c'"),
        (["--head-dim", "64"], "says what --head-dim would say again"),
        (["--cap", "requested"], "--cap requested needs --context"),
        (["--weights", "maybe"], "maybe"),
    ],
)
def test_a_mistake_exits_2_with_a_sentence(example, arguments, words):
    result = invoke(*example, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model was named"),
        (["--num-layers", "3"], "needs --num-kv-heads too"),
        (["--num-layers", "0", "--num-kv-heads", "1", "--head-dim", "8"], "--num-layers must be at least 1, got 0"),
    ],
)
def test_a_shape_that_is_not_whole_exits_2(example, arguments, words):
    result = invoke(*arguments, *example[2:])
    assert result.exit_code == 2
    assert words in result.stderr


def test_weights_that_numbers_do_not_tell_exit_3(example):
    result = invoke("--num-layers", 2, "--num-kv-heads", 1, "--head-dim", 8, *example[2:4])
    assert result.exit_code == 3
    assert "give --weights loaded" in result.stderr
