"""docs/faults.md explains every fault name, knows no other, and its commands name shapes and probes that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pabench.checks.kernel.probes import PROBES
from pabench.checks.kernel.shapes import find_shape
from pabench.faults import FAULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
FAULT_PAGE = (DOCS / "faults.md").read_text(encoding="utf-8")
PAGES = FAULT_PAGE + (DOCS / "localize.md").read_text(encoding="utf-8")


def headings(page: str) -> Counter[str]:
    """Names in headings of the third level, such as ``### `head_map` ``."""
    return Counter(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))


def test_each_fault_has_one_heading():
    assert {name: headings(FAULT_PAGE)[name] for name in FAULTS} == dict.fromkeys(FAULTS, 1)


def test_no_heading_names_an_unknown_fault():
    assert set(headings(FAULT_PAGE)) <= set(FAULTS)
    assert len(re.findall(r"^### ", FAULT_PAGE, re.MULTILINE)) == headings(FAULT_PAGE).total()


def test_a_table_row_names_a_fault_that_has_a_heading():
    rows = set(re.findall(r"^\| `(\w+)` \|", FAULT_PAGE, re.MULTILINE))
    assert rows
    assert rows <= set(FAULTS)


def test_a_missing_and_an_invented_name_would_be_seen():
    page = FAULT_PAGE.replace("### `head_map`", "### `head_mop`")
    assert headings(page)["head_map"] == 0
    assert set(headings(page)) - set(FAULTS) == {"head_mop"}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"--batch-spec ([\w.-]+)", PAGES))))
def test_shape_named_in_a_command_exists(name):
    assert find_shape(name, 16).name == name


@pytest.mark.parametrize("name", sorted(set(re.findall(r"--probe (\w+)", PAGES))))
def test_probe_named_in_a_command_exists(name):
    assert name in PROBES
