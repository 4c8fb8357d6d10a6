import pytest

from pabench.cases import precisions
from pabench.errors import UsageError
from pabench.prompts import bank, choose, read_prompts
from pabench.suite import list_suites, load_suite


def test_every_built_in_suite_is_valid():
    assert [name for name, _, _ in list_suites()] == ["kernels", "quick", "real", "smoke"]


def test_flags_replace_what_the_suite_says():
    assert load_suite("quick", {"dtypes": ["fp16"]}).dtypes == ("fp16",)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("quik", {}, "unknown suite 'quik'; did you mean 'quick'"),
        ("quick", {"dtypes": ["bf61"]}, "unknown dtype 'bf61'; did you mean 'bf16'"),
        ("quick", {"kv_dtype": "fp8"}, "unknown kv-dtype 'fp8'; did you mean 'fp8_e"),
        ("quick", {"block_size": 0}, "block_size: input should be greater than or equal to 1, got 0"),
        ("quick", {"blocksize": 4}, "unknown key 'blocksize'; did you mean 'block_size'"),
        ("quick", {"checks": ["kernal"]}, "unknown check 'kernal'"),
        ("quick", {"models": []}, "the model check needs models"),
        ("kernels", {"checks": ["model"]}, "the model check needs models"),
        ("kernels", {"kernel_check": {"probes": ["coutn"]}}, "unknown probe 'coutn'; did you mean 'count'"),
        ("kernels", {"kernel_check": {"cuont": 3}}, "unknown key 'kernel_check.cuont'; did you mean 'count'"),
    ],
)
def test_a_mistake_is_one_sentence_with_a_hint(name, changes, words):
    with pytest.raises(UsageError) as caught:
        load_suite(name, changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dtype_flag_holds_for_the_kernel_check_too(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "name: s\ndescription: d\nkernels: [torch_paged]\ndtypes: [fp32]\nchecks: [kernel]\n"
        "kernel_check: {dtypes: [bf16], count: 7}\n"
    )
    suite = load_suite(str(tmp_path / "s.yaml"), {"dtypes": ["fp16"], "kernel_check": {"probes": ["iid"]}})
    assert (suite.kernel_check.dtypes, suite.kernel_check.count, suite.kernel_check.probes) == (None, 7, ("iid",))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "", "name: x\n"])
def test_a_file_that_is_no_suite_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="suite"):
        load_suite(str(file))


def test_fp8_is_bf16_over_an_fp8_cache():
    (p,) = precisions(load_suite("quick", {"dtypes": ["fp8"]}))
    assert (p.dtype, p.kv_dtype, p.quantized) == ("bf16", "fp8_e4m3", True)


def test_an_explicit_kv_dtype_holds_for_every_dtype():
    found = precisions(load_suite("quick", {"dtypes": ["bf16", "fp8"], "kv_dtype": "fp8_e5m2"}))
    assert [(p.dtype, p.kv_dtype) for p in found] == [("bf16", "fp8_e5m2")]


def test_another_seed_chooses_other_prompts_and_the_same_seed_the_same():
    kinds = ["question", "prose", "code", "long"]
    assert choose(kinds, 1) == choose(kinds, 1)
    assert len({tuple(p.id for p in choose(kinds, seed)) for seed in range(10)}) > 5


def test_the_bank_has_no_two_prompts_of_one_id():
    ids = [p.id for p in bank()]
    assert len(ids) == len(set(ids))


def test_prompts_are_read_from_text_and_json_lines(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('"one"\n{"text": "two"}\n')
    assert [p.text for p in read_prompts(str(text))] == ["one", "two"]
    assert [p.text for p in read_prompts(str(lines))] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "is empty"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", '{"txet": 1}\n', "line 1"),
        ("a.jsonl", '{"text": ""}\n', "non-empty string"),
    ],
)
def test_an_unusable_prompts_file_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words):
        read_prompts(str(tmp_path / name))


def test_a_missing_or_binary_prompts_file_is_refused(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name, words in (("missing.txt", "No such file"), ("b.txt", "not UTF-8")):
        with pytest.raises(UsageError, match=words):
            read_prompts(str(tmp_path / name))
