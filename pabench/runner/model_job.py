"""The model check's work for all kernels: what runs in its child process. Importing this imports no transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pabench.cases import ModelCase
from pabench.models.load import ModelSource
from pabench.prompts import Prompt
from pabench.records import Record
from pabench.runner.events import Emit
from pabench.suite import Suite


@dataclass(frozen=True)
class ModelJob:
    """Model cases to judge, in the order of ``cases`` within one model and precision."""

    suite: Suite
    prompts: tuple[Prompt, ...]
    sources: tuple[ModelSource, ...]
    cases: tuple[ModelCase, ...]
    device: str
    on_fallback: Literal["fail", "warn", "allow"]
    capture: Path | None = None  # a folder for some attention calls


def judge_model_job(job: ModelJob, emit: Emit) -> Iterator[Record]:
    """One record per case, as long as the device lives."""
    from pabench.runner.model_judging import judge_models

    return judge_models(job, emit)
