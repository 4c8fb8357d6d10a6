"""suites/*.yaml → validated, resolved, frozen Suite. Flags of the command line replace what it says. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pabench.errors import UsageError, did_you_mean, exists
from pabench.probes import PROBES

DTYPES = ("fp32", "bf16", "fp16", "fp8")
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")
CHECKS = ("kernel", "model")


class PromptChoice(BaseModel):
    """How many prompts of which kinds the seed picks from the bank, and how long they may be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kinds: tuple[str, ...] = Field(min_length=1)
    max_tokens: int = Field(default=512, strict=True, ge=1)


class KernelCheck(BaseModel):
    """Which generated batches the kernel check judges: ``count`` pairs of shape and probe per dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtypes: tuple[str, ...] | None = None  # those of the suite where none are given
    count: int = Field(default=345, strict=True, ge=1)
    seed: int = 0  # added to the run's
    batch_specs: tuple[str, ...] = ()  # all shapes of the table where none are given
    probes: tuple[str, ...] = ()  # all probes where none are given

    @field_validator("dtypes")
    @classmethod
    def _known_dtypes(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(_one_of("dtype", v, DTYPES) for v in dict.fromkeys(value))

    @field_validator("probes")
    @classmethod
    def _known_probes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_one_of("probe", v, tuple(PROBES)) for v in dict.fromkeys(value))


class Suite(BaseModel):
    """What to judge. Every field is resolved: nothing is read later from the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    models: tuple[str, ...] = ()  # needed by the model check only
    kernels: tuple[str, ...] = Field(min_length=1)
    dtypes: tuple[str, ...] = Field(min_length=1)
    kv_dtype: str = "auto"
    checks: tuple[str, ...] = Field(default=("model",), min_length=1)
    block_size: int = Field(default=16, strict=True, ge=1, le=512)
    token_budget: int = Field(default=128, strict=True, ge=1)
    max_new_tokens: int = Field(default=24, strict=True, ge=2)
    prompts: PromptChoice = PromptChoice(kinds=("question", "dialogue", "code", "long"), max_tokens=104)
    kernel_check: KernelCheck = KernelCheck()

    @model_validator(mode="after")
    def _models_for_the_model_check(self) -> Suite:
        if "model" in self.checks and not self.models:
            raise ValueError("the model check needs models: name some in the suite's key 'models' or with -m")
        return self

    @field_validator("models", "kernels")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("dtypes")
    @classmethod
    def _known_dtypes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_one_of("dtype", v, DTYPES) for v in dict.fromkeys(value))

    @field_validator("checks")
    @classmethod
    def _known_checks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_one_of("check", v, CHECKS) for v in dict.fromkeys(value))

    @field_validator("kv_dtype")
    @classmethod
    def _known_kv_dtype(cls, value: str) -> str:
        return _one_of("kv-dtype", value, KV_DTYPES)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} '{value}'; {did_you_mean(value, known)}")
    return value


@cache
def suites_folder() -> Path:
    """The built-in suites: in the installed package, else in the checkout."""
    package = Path(str(files("pabench"))) / "builtin_suites"
    return package if package.is_dir() else Path(str(files("pabench"))).parent / "suites"


def list_suites() -> list[tuple[str, str, Path]]:
    """(name, description, path) of the built-in suites."""
    suites = [(load_suite(str(path)), path) for path in sorted(suites_folder().glob("*.yaml"))]
    return [(suite.name, suite.description, path) for suite, path in suites]


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent choice of the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.YAMLError(f"key '{twice}' stands there twice")
        return super().construct_mapping(node, deep)


def load_suite(name: str, changes: Mapping[str, Any] | None = None) -> Suite:
    """A built-in suite or a YAML file, with ``changes`` replacing its top-level fields. Raises ``UsageError``."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else suites_folder() / f"{name}.yaml"
    if not exists(path):
        known = [p.stem for p in suites_folder().glob("*.yaml")]
        raise UsageError(f"unknown suite '{name}'; {did_you_mean(name, known)} (or give a YAML file)")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"suite '{name}' cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"suite '{name}' is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UsageError(f"suite '{name}' must be a mapping of keys, got {type(data).__name__}")
    try:
        return Suite.model_validate(_changed(data, changes or {}))
    except ValidationError as error:
        raise UsageError(f"suite '{name}': {_sentence(error)}") from error


def _changed(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` replace; those below kernel_check one by one, and a dtype asked for holds for that check too."""
    merged = {**data, **changes}
    own = data.get("kernel_check", {})
    if isinstance(own, dict) and ("kernel_check" in changes or "dtypes" in changes):
        kept = {k: v for k, v in own.items() if not (k == "dtypes" and "dtypes" in changes)}
        merged["kernel_check"] = {**kept, **changes.get("kernel_check", {})}
    return merged


def _sentence(error: ValidationError) -> str:
    """One of the problems found, as a sentence with a hint; a misspelt key before the missing one it causes."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        nested: dict[Any, type[BaseModel]] = {"prompts": PromptChoice, "kernel_check": KernelCheck}
        model = nested.get(first["loc"][0], Suite) if len(first["loc"]) > 1 else Suite
        return f"unknown key '{where}'; {did_you_mean(str(first['loc'][-1]), model.model_fields)}"
    if first["type"] == "missing":
        return f"key '{where}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    return (
        message if message.startswith("unknown") or not where else f"{where}: {message.lower()}, got {first['input']!r}"
    )
