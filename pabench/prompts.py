"""Prompts: picked from the bank by seed, or read from a user's file. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pabench.errors import UsageError
from pabench.suite import suites_folder


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str


def bank() -> list[Prompt]:
    """All prompts that come with pabench."""
    lines = (suites_folder() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def choose(kinds: Sequence[str], seed: int) -> list[Prompt]:
    """One prompt for each of ``kinds`` (a kind named twice gives two), another choice for another seed."""
    generator = random.Random(seed)
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in bank():
        by_kind.setdefault(prompt.kind, []).append(prompt)
    unknown = sorted(set(kinds) - set(by_kind))
    if unknown:
        raise UsageError(f"unknown prompt kind '{unknown[0]}'; known: {', '.join(sorted(by_kind))}")
    for prompts in by_kind.values():
        generator.shuffle(prompts)
    chosen = []
    for kind in kinds:
        if not by_kind[kind]:
            raise UsageError(f"prompt kind '{kind}' is asked for more often than the bank has prompts of it")
        chosen.append(by_kind[kind].pop())
    return chosen


def read_prompts(path: str) -> list[Prompt]:
    """A user's prompts: a text file with one prompt a line, or JSON lines (strings, or objects with "text")."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts file '{path}' cannot be read: {reason}") from error
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f"prompts file '{path}' is empty; give one prompt a line")
    if file.suffix not in (".jsonl", ".json"):
        return [Prompt(f"line-{n}", "file", line) for n, line in lines]
    prompts = []
    for n, line in lines:
        try:
            value = json.loads(line)
            content = value if isinstance(value, str) else value["text"]
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"prompts file '{path}', line {n}: must be a JSON string or an object with \"text\", got {line[:60]!r}"
            ) from error
        if not isinstance(content, str) or not content:
            raise UsageError(f"prompts file '{path}', line {n}: the text must be a non-empty string, got {content!r}")
        prompts.append(Prompt(f"line-{n}", "file", content))
    return prompts
