"""The groups inside a record. Field names are the contract of ``cases.jsonl``; a group that does not apply is null.

Import them from ``pabench.records``. Floats may be NaN or infinite: written as the strings "NaN", "Infinity" and
"-Infinity", read back as floats.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    WithJsonSchema,
    field_validator,
)

from pabench.errors import did_you_mean
from pabench.faults import FAULTS

Speed = Literal["FASTER", "SAME", "SLOWER", "AMBIGUOUS", "UNKNOWN"]
Proof = Literal["proved", "claimed", "fell_back", "unknown"]

_NONFINITE = ("NaN", "Infinity", "-Infinity")
Num = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(_NONFINITE)}]})]


def revive(value: Any) -> Any:
    """Turn "NaN", "Infinity" and "-Infinity" back into floats, at any depth of free-form data."""
    if isinstance(value, dict):
        return {k: revive(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [revive(v) for v in value]
    return float(value) if isinstance(value, str) and value in _NONFINITE else value


FreeForm = Annotated[dict[str, Any], BeforeValidator(revive)]


class Group(BaseModel):
    """Frozen; an unknown field is an error; NaN and Inf are written as strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        serialize_by_alias=True,
        json_schema_serialization_defaults_required=True,
    )


class Fallback(Group):
    """One substitution: ``from_`` (written "from") was asked for, ``to`` computed the result."""

    from_: str = Field(validation_alias=AliasChoices("from", "from_"), serialization_alias="from")
    to: str
    reasons: list[str]
    phase: str
    layer: int | None
    calls: NonNegativeInt


class Execution(Group):
    """What was asked for and chosen per phase, and what ran: launches per kernel over all layers and steps."""

    requested: dict[str, str]
    selected: dict[str, str]
    executed: dict[str, NonNegativeInt]
    paired: str | None = None
    fallbacks: list[Fallback] = []
    proof: Proof


class Worst(Group):
    """Where the worst row lies. ``block`` is logical, ``physical_block`` and ``slot`` are in the pool."""

    seq: int | None = None
    q_head: int | None = None
    kv_head: int | None = None
    token: int | None = None
    block: int | None = None
    physical_block: int | None = None
    slot: int | None = None
    dim: int | None = None
    layer: int | None = None
    phase: str | None = None


class Accuracy(Group):
    """Attention output against the fp64 oracle, by the three-way rule.

    ``tolerance_ratio`` is the worst row's error over its own tolerance: above 1 is a failure.
    """

    rel_l2_max: Num
    noise_floor: Num
    ratio_to_floor: Num
    max_abs: Num
    max_ulp: Num | None = None
    nonfinite: NonNegativeInt = 0
    quantization_rel_l2: Num | None = None
    worst: Worst | None = None
    tolerance_ratio: Num | None = None
    rows: NonNegativeInt | None = None
    rows_beyond: NonNegativeInt | None = None
    first_bad_layer: int | None = None


class Distribution(Group):
    """KL divergence, reference to candidate, in nats per position."""

    mean: Num
    stderr: Num
    median: Num
    p95: Num
    p99: Num
    max: Num


class DeltaP(Group):
    """Change of the reference token's probability."""

    mean: Num
    rms: Num
    p1: Num
    p99: Num


class NoiseFloor(Group):
    """What the dense path differs from itself by; ``margin`` is a top-2 logit margin that noise alone can turn."""

    kld_mean: Num
    kld: Distribution | None = None
    same_top_p: Num | None = None
    max_abs: Num | None = None
    margin: Num | None = None
    variants: dict[str, Num] = {}  # mean KLD of each variant measured: eager, another batch composition, …


class OracleKld(Group):
    """Mean KLD of each path to the fp32 model: a candidate nearer than the reference is not worse."""

    kld_reference: Num
    kld_candidate: Num


class Logits(Group):
    """Teacher-forced comparison with the dense path."""

    n_tokens: NonNegativeInt
    kld: Distribution
    dp: DeltaP
    same_top_p: Num
    ppl_ratio: Num
    max_abs: Num
    noise_floor: NoiseFloor
    oracle: OracleKld | None = None
    quantization_kld: Num | None = None

    @property
    def ratio_to_floor(self) -> float:
        """Mean KLD over the floor's. A floor of 0 gives infinity for any difference, and 0 for none."""
        floor, mean = self.noise_floor.kld_mean, self.kld.mean
        if floor == 0:
            return mean if math.isnan(mean) else (math.inf if mean > 0 else 0.0)
        return mean / floor


class DivergenceIndex(Group):
    """Generated-token positions at which sequences first differ; null where none does."""

    min: int | None = None
    median: Num | None = None
    max: int | None = None
    per_prompt: dict[str, int | None] = {}


class TokenClasses(Group):
    identical: NonNegativeInt = 0
    near_tie: NonNegativeInt = 0
    beyond_noise: NonNegativeInt = 0
    degenerate: NonNegativeInt = 0


class FirstDivergence(Group):
    """The first token on which the two texts part. ``margin`` is the reference's top-2 logit margin there."""

    prompt: str
    index: NonNegativeInt
    reference_token: int | None
    candidate_token: int | None
    margin: Num
    margin_over_floor: Num
    reference_text: str | None = None
    candidate_text: str | None = None
    prompt_text: str | None = None


class Tokens(Group):
    """Free-running greedy texts. ``prefix_match`` is the mean share of tokens before the first difference."""

    n_seq: NonNegativeInt
    divergence_index: DivergenceIndex
    prefix_match: Num
    classes: TokenClasses
    first: FirstDivergence | None = None


class Flips(Group):
    lost: NonNegativeInt
    gained: NonNegativeInt


class Tasks(Group):
    """A task's score on both sides, paired by document. ``mde``: smallest change that n documents can show."""

    task: str
    metric: str
    filter: str | None = None
    n: NonNegativeInt
    reference: Num
    candidate: Num
    delta: Num
    flips: Flips
    p_value: Num | None = None
    mde: Num | None = None
    flags: list[str] = []


class Timing(Group):
    unit: Literal["us"] = "us"
    n: NonNegativeInt
    median: Num
    p05: Num
    p95: Num
    ci: tuple[Num, Num] | None = None
    samples_file: str | None = None
    verdict: Speed | None = None


class Bandwidth(Group):
    bytes: NonNegativeInt
    gb_per_s: Num
    pct_of_measured_copy: Num | None = None


class Diagnosis(Group):
    fault: str
    confidence: Num
    evidence: FreeForm = {}
    first_layer: int | None = None

    @field_validator("fault")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in FAULTS:
            raise ValueError(f"unknown fault '{value}': {did_you_mean(value, FAULTS)}")
        return value


class MemoryItem(Group):
    """Bytes; null is unknown, never 0."""

    planned: NonNegativeInt | None
    measured: NonNegativeInt | None


class Memory(Group):
    """The device's memory before the block pool was made, the blocks that its plan says fit, and where it went:
    weights, buffers, kv_pool, kept_kv (K and V that shadow mode keeps) and activations."""

    device: str
    total_bytes: NonNegativeInt | None
    used_bytes: NonNegativeInt | None
    unknown: str | None = None  # why, where the device could not be measured
    block_bytes: NonNegativeInt
    needed_blocks: NonNegativeInt
    fit_blocks: NonNegativeInt | None
    items: dict[str, MemoryItem]
