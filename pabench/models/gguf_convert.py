"""A GGUF file becomes, once, a folder of fp32 safetensors that loads ten times faster."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pabench.errors import CannotJudge, PabenchError, UsageError
from pabench.models import folder
from pabench.models.cache import build_once, cache_root
from pabench.models.notices import notice, quiet_transformers

_FP32_BYTES_PER_GGUF_BYTE = 9  # the most that 4-bit weights grow to; 2-bit ones may grow more and then meet a full disk


def converted(gguf: Path) -> Path:
    """The cached fp32 folder of a GGUF file, made on first use. Raises as ``convert`` does."""
    _require_magic(gguf)
    sha256 = _known_sha256(gguf)

    def build(into: Path) -> None:
        notice(f"converting {gguf.name} to fp32 safetensors, once")
        convert(gguf, into, sha256=sha256)

    needed_bytes = _FP32_BYTES_PER_GGUF_BYTE * gguf.stat().st_size
    return build_once(f"gguf/{sha256[:32]}", build, needed_bytes=needed_bytes, is_whole=folder.is_whole)


def convert(gguf: Path, into: Path, *, sha256: str) -> None:
    """Write model (fp32) and tokenizer of ``gguf`` into the folder ``into``.

    ``load_gguf_checkpoint`` is called directly: ``from_pretrained(gguf_file=…)`` demands accelerate and leaves
    quantisation attributes on the model that must be removed before it can be saved.
    Raises ``UsageError`` for a damaged file, ``CannotJudge`` for an architecture that transformers cannot read.
    """
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    _require_magic(gguf)
    auto: Any = transformers  # untyped there
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    where = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers():
        try:
            config = auto.AutoConfig.from_pretrained(gguf.parent, **where)
            tokenizer = auto.AutoTokenizer.from_pretrained(gguf.parent, **where)
            model = auto.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tensors = read(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
            lacking = model.load_state_dict(tensors, strict=False).missing_keys
        except OSError as error:
            if error.errno is not None:  # a real one of the file system; transformers' own carry no number
                raise
            raise _explain(gguf, error) from error
        except Exception as error:
            raise _explain(gguf, error) from error
        model.tie_weights()
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        if lacking := sorted(set(lacking) - tied):
            raise UsageError(
                f"'{gguf.name}' lacks weights of {type(model).__name__} ({len(lacking)}, the first is {lacking[0]}); "
                "get the file again, or use the model's safetensors"
            )
        config.name_or_path = model.name_or_path = tokenizer.name_or_path = ""
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    for file in into.glob("*.safetensors"):
        file.chmod((into / "config.json").stat().st_mode)  # safetensors makes them readable to their owner alone
    (into / folder.SOURCE_FILE).write_text(json.dumps({"gguf_sha256": sha256}))


def _require_magic(gguf: Path) -> None:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UsageError(f"'{gguf.name}' is not a GGUF file (it does not start with 'GGUF'); check the path given")


def _explain(gguf: Path, error: Exception) -> PabenchError:
    if "not supported" in str(error) or isinstance(error, NotImplementedError):
        return CannotJudge(
            f"transformers cannot read the architecture or quantisation of '{gguf.name}' ({_first_line(error)}); "
            "use the model's safetensors"
        )
    return UsageError(f"'{gguf.name}' is cut off or damaged ({_first_line(error)}); get the file again")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _known_sha256(gguf: Path) -> str:
    """The file's SHA-256, remembered by path, size and modification time so that gigabytes are hashed once."""
    status = gguf.stat()
    stamp = cache_root() / "gguf" / f"{folder.digest([str(gguf.resolve()), status.st_size, status.st_mtime_ns])}.sha256"
    try:
        if len(known := stamp.read_text()) == 64:
            return known
    except OSError:
        pass
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(sha256)
    except OSError:
        pass  # only a shortcut: whether the cache can be written is build_once's to say
    return sha256
