import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from pabench.errors import CannotJudge, UsageError
from pabench.models import folder, gguf_convert
from pabench.models.gguf_convert import converted


def entries(cache: Path) -> list[str]:
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix not in (".lock", ".sha256")]
    return sorted(path.name for path in files)


def test_the_weights_are_the_ggufs_in_fp32(tiny_gguf):
    path = converted(tiny_gguf)
    weights = load_file(path / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tiny_gguf).tensors}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"].numpy(), tensors["token_embd.weight"].data)
    np.testing.assert_array_equal(
        weights["model.layers.0.mlp.down_proj.weight"].numpy(), tensors["blk.0.ffn_down.weight"].data
    )
    assert folder.is_whole(path)


def test_a_file_is_converted_once_wherever_it_lies(tiny_gguf, tmp_path, cache, monkeypatch):
    path = converted(tiny_gguf)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    monkeypatch.setattr(gguf_convert, "convert", lambda *args, **kwargs: pytest.fail("converted again"))
    assert converted(tiny_gguf) == converted(copy) == path
    assert path == cache / "gguf" / hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()[:32]


def test_a_changed_file_is_another_model(tiny_gguf):
    before = converted(tiny_gguf)
    content = bytearray(tiny_gguf.read_bytes())
    content[-3] ^= 1
    tiny_gguf.write_bytes(content)
    assert converted(tiny_gguf) != before


def test_another_kind_of_file(tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_text("<html>not found</html>")
    with pytest.raises(UsageError, match=r"'model.gguf' is not a GGUF file.*check the path"):
        converted(path)
    assert entries(cache) == []


@pytest.mark.parametrize("kept", [4, 20, 200, 5000, -1, -4000], ids=str)
def test_a_cut_off_file(tiny_gguf, cache, kept):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"'tiny.gguf' is cut off or damaged \(.*\); get the file again") as error:
        converted(tiny_gguf)
    assert "\n" not in str(error.value)
    assert entries(cache) == []


def test_an_architecture_that_transformers_cannot_read(tiny_gguf, cache):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes().replace(b"llama", b"lloma"))
    with pytest.raises(
        CannotJudge, match=r"architecture or quantisation of 'tiny.gguf' .*lloma.*use the model's safetensors"
    ):
        converted(tiny_gguf)
    assert entries(cache) == []


def test_weights_that_the_file_lacks(tiny_gguf, cache):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(
        UsageError,
        match=r"'tiny.gguf' lacks weights of LlamaForCausalLM \(1, the first is .*self_attn.q_proj.weight\)",
    ):
        converted(tiny_gguf)
    assert entries(cache) == []


def test_a_conversion_killed_before_its_end_is_done_again(tiny_gguf, cache, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerBase, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            converted(tiny_gguf)
    assert entries(cache) == []
    assert folder.is_whole(converted(tiny_gguf))


def test_nothing_is_written_to_stdout(tiny_gguf, capfd):
    converted(tiny_gguf)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "converting tiny.gguf to fp32 safetensors, once\n"
