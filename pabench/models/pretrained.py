"""A folder of config, safetensors and tokenizer becomes a model, or one sentence saying why it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pabench.errors import CannotJudge, PabenchError, UsageError
from pabench.models import folder
from pabench.models.geometry import describe_attention
from pabench.models.notices import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REMEDY = "copy or download the model again"


def load_pretrained(
    path: Path, name: str, dtype: torch.dtype, attn_implementation: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with its weights rounded once to ``dtype`` on load, and its tokenizer. No code of the folder is run.

    Raises ``UsageError`` for damaged or missing files, ``CannotJudge`` for an architecture that cannot be used.
    """
    from transformers import AutoConfig, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(path, **local)
        except Exception as error:
            raise _config_error(path, name, error) from error
        describe_attention(config)  # refuse before gigabytes are read
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **local)
        except Exception as error:
            reason = _line(error, path) if folder.has_tokenizer(path) else "no tokenizer file in its folder"
            raise UsageError(f"model '{name}' has no usable tokenizer ({reason}); {_REMEDY}") from error
        model = _load_weights(path, name, config, dtype, attn_implementation, local)
    return model, tokenizer


def _load_weights(
    path: Path, name: str, config: Any, dtype: torch.dtype, attn_implementation: str | None, local: dict[str, Any]
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # untyped in transformers
    try:
        model_class = auto._model_mapping[type(config)]
    except KeyError as error:
        raise CannotJudge(
            f"model '{name}' is a '{config.model_type}', no causal language model; name one that generates text"
        ) from error
    has_sdpa = model_class._supports_sdpa
    if attn_implementation == "sdpa" and not has_sdpa:
        raise CannotJudge(f"{model_class.__name__} has no sdpa attention in this transformers; ask for 'eager'")
    attn_implementation = attn_implementation or ("sdpa" if has_sdpa else "eager")
    try:
        model, loading = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the weight's name
            use_safetensors=True,
            **local,
        )
    except Exception as error:
        raise UsageError(
            f"the weights of model '{name}' are damaged or do not fit its config ({_line(error, path)}); {_REMEDY}"
        ) from error
    if unfit := sorted(key for key, *_ in loading["mismatched_keys"]):
        raise UsageError(f"weight {unfit[0]} of model '{name}' has not the shape that its config names; {_REMEDY}")
    if lacking := sorted(loading["missing_keys"]):  # transformers would leave them random, and only warn
        raise UsageError(f"model '{name}' lacks weights ({len(lacking)}, the first is {lacking[0]}); {_REMEDY}")
    return model  # type: ignore[no-any-return]


def _config_error(path: Path, name: str, error: Exception) -> PabenchError:
    if isinstance(error, (ValueError, KeyError)) and any(
        words in str(error) for words in ("does not recognize", "trust_remote_code", "remote code", "custom code")
    ):
        return CannotJudge(
            f"model '{name}' has an architecture that this transformers does not know ({_line(error, path)}); "
            "update transformers; code shipped with a model is never run"
        )
    return UsageError(f"the config.json of model '{name}' cannot be read ({_line(error, path)}); {_REMEDY}")


def _line(error: Exception, path: Path) -> str:
    """The first sentence of transformers' message, without the absolute path, which has no business in a record."""
    text = " ".join(str(error).replace(str(path), path.name).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")[:200]
