"""Memory is what the tightest container leaves."""

from __future__ import annotations

import pytest

from pabench.memory import Memory, memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A machine of 16 GiB, 12 of them available; ``machine(cgroup, {folder: (limit, used, droppable)})``."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\nX: 1\n")

    def make(cgroup="", limits=(), names=("memory.max", "memory.current", "inactive_file")):
        (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
        for folder, (limit, used, droppable) in dict(limits).items():
            group = tmp_path / "sys" / folder
            group.mkdir(parents=True, exist_ok=True)
            (group / names[0]).write_text(f"{limit}\n")
            (group / names[1]).write_text(f"{used}\n")
            (group / "memory.stat").write_text(f"anon 1\n{names[2]} {droppable}\n")
        return memory(tmp_path / "proc", tmp_path / "sys")

    return make


def test_without_a_container_it_is_the_machines(machine):
    assert machine() == Memory(16 * GIB, 12 * GIB, "machine")


def test_a_container_leaves_its_limit_less_what_cannot_be_dropped(machine):
    assert machine("0::/a\n", {"a": (4 * GIB, 3 * GIB, 1 * GIB)}) == Memory(4 * GIB, 2 * GIB, "container")


def test_the_tightest_of_nested_containers_counts(machine):
    limits = {"a/b": ("max", 0, 0), "a": (6 * GIB, 1 * GIB, 0), "": (8 * GIB, 7 * GIB, 0)}
    assert machine("0::/a/b\n", limits) == Memory(6 * GIB, 1 * GIB, "container")


def test_control_groups_of_version_1(machine):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limits = {"memory/x": (2 * GIB, 1 * GIB, 0), "memory": ((1 << 63) - 4096, 0, 0)}
    assert machine("5:cpu:/x\n4:memory:/x\n", limits, names) == Memory(2 * GIB, 1 * GIB, "container")


def test_a_system_that_does_not_say(tmp_path):
    assert memory(tmp_path, tmp_path) is None
