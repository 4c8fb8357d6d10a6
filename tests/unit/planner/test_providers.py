"""Memory as the system reports it: trees of files for Linux and its cgroups, a stand-in torch for accelerators."""

from types import SimpleNamespace

import pytest

from pabench.errors import CannotJudge
from pabench.planner import providers
from pabench.planner.budget import Device
from tests.unit.planner.worked import GIB, MIB, plan

MEMINFO = {"MemTotal": 24 * GIB, "MemFree": 3 * GIB, "MemAvailable": 20 * GIB}
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    """``machine({path: text or int})``: a Linux with 24 GiB of which 20 are available, and these files beside it."""

    def make(files=None, **meminfo):
        lines = [f"{name}: {value // 1024} kB" for name, value in (MEMINFO | meminfo).items()]
        for path, content in {"proc/meminfo": "\n".join(lines), **(files or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{content}\n")
        return providers.cpu(tmp_path)

    return make


def v2(folder, limit, current, active=0, inactive=0):
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": current,
        f"{folder}/memory.stat": f"anon 1\nfile 5\nactive_file {active}\ninactive_file {inactive}",
    }


def v1(folder, limit, usage, active=0, inactive=0):
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": f"cache 5\ntotal_active_file {active}\ntotal_inactive_file {inactive}",
    }


OWN_V2 = {"proc/self/cgroup": "0::/user/app"}
OWN_V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/"}


def numbers(device):
    return device.total_bytes, device.used_bytes


def test_without_cgroups_the_machine_counts(machine):
    assert numbers(machine()) == (24 * GIB, 4 * GIB)


def test_the_limit_of_the_own_cgroup_counts(machine):
    files = OWN_V2 | v2("sys/fs/cgroup/user/app", 8 * GIB, 3 * GIB)
    assert numbers(machine(files)) == (8 * GIB, 3 * GIB)


def test_page_cache_that_can_be_reclaimed_is_free(machine):
    files = OWN_V2 | v2("sys/fs/cgroup/user/app", 8 * GIB, 7 * GIB, active=1 * GIB, inactive=3 * GIB)
    assert numbers(machine(files)) == (8 * GIB, 3 * GIB)


def test_a_limit_further_up_counts_too(machine):
    files = OWN_V2 | v2("sys/fs/cgroup/user/app", "max", 1 * GIB) | v2("sys/fs/cgroup/user", 6 * GIB, 2 * GIB)
    assert numbers(machine(files)) == (6 * GIB, 2 * GIB)


def test_a_full_parent_leaves_less_free_than_a_smaller_child(machine):
    files = OWN_V2 | v2("sys/fs/cgroup/user/app", 4 * GIB, 1 * GIB) | v2("sys/fs/cgroup/user", 10 * GIB, 9 * GIB)
    assert numbers(machine(files)) == (4 * GIB, 3 * GIB)


def test_in_a_container_the_limit_stands_at_the_mounts_root(machine):
    files = {"proc/self/cgroup": "0::/"} | v2("sys/fs/cgroup", 2 * GIB, 1 * GIB)
    assert numbers(machine(files)) == (2 * GIB, 1 * GIB)


def test_no_limit_is_no_limit(machine):
    assert numbers(machine(OWN_V2 | v2("sys/fs/cgroup/user/app", "max", 1 * GIB))) == (24 * GIB, 4 * GIB)
    assert numbers(machine(OWN_V1 | v1("sys/fs/cgroup/memory/docker/abc", NO_LIMIT_V1, GIB))) == (24 * GIB, 4 * GIB)


def test_v1_limits_count(machine):
    files = OWN_V1 | v1("sys/fs/cgroup/memory/docker/abc", 5 * GIB, 4 * GIB, active=GIB, inactive=GIB)
    assert numbers(machine(files)) == (5 * GIB, 2 * GIB)


def test_v1_in_a_container_that_sees_only_its_own_root(machine):
    assert numbers(machine(OWN_V1 | v1("sys/fs/cgroup/memory", 5 * GIB, 4 * GIB))) == (5 * GIB, 4 * GIB)


def test_v2_beside_v1_is_found_where_it_is_mounted(machine):
    files = OWN_V1 | v2("sys/fs/cgroup/unified", 3 * GIB, 1 * GIB)
    assert numbers(machine(files)) == (3 * GIB, 1 * GIB)


def test_a_limit_above_the_machine_changes_nothing(machine):
    assert numbers(machine(OWN_V2 | v2("sys/fs/cgroup/user/app", 64 * GIB, 1 * GIB))) == (24 * GIB, 4 * GIB)


def test_usage_above_the_limit_leaves_nothing_and_not_less(machine):
    assert numbers(machine(OWN_V2 | v2("sys/fs/cgroup/user/app", 2 * GIB, 3 * GIB))) == (2 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        OWN_V2 | {"sys/fs/cgroup/user/app/memory.max": "8 GB"},
        OWN_V2 | {"sys/fs/cgroup/user/app/memory.max": 8 * GIB},  # and no memory.current
        {"proc/meminfo": "MemTotal: lots kB"},
        {"proc/meminfo": "MemTotal: 1 kB"},  # and no MemAvailable
    ],
    ids=["limit", "usage", "total", "available"],
)
def test_what_cannot_be_read_is_unknown_and_never_0(machine, files):
    device = machine(files)
    assert numbers(device) == (None, None)
    assert device.why
    with pytest.raises(CannotJudge, match="memory of device 'cpu' is unknown"):
        plan(devices=(device,))


def test_the_planner_honours_the_cgroup(machine):
    files = OWN_V2 | v2("sys/fs/cgroup/user/app", 8 * GIB, 7 * GIB, inactive=6 * GIB)
    made = plan(devices=(machine(files),))
    assert made.num_blocks == (8 * GIB * 9 // 10 - 1 * GIB) // (4 * MIB)


def fake_torch(*, free_total=None, hip=None, mps=None, error=None):
    def mem_get_info(index):
        if error:
            raise RuntimeError(error)
        return free_total[index]

    return SimpleNamespace(
        version=SimpleNamespace(hip=hip),
        cuda=SimpleNamespace(
            is_available=lambda: bool(free_total), device_count=lambda: len(free_total), mem_get_info=mem_get_info
        ),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps is not None)),
        mps=SimpleNamespace(recommended_max_memory=lambda: mps[0], driver_allocated_memory=lambda: mps[1]),
    )


@pytest.mark.parametrize(("hip", "kind"), [(None, "cuda"), ("6.4", "rocm")])
def test_a_gpu_reports_what_its_driver_says_is_free(hip, kind):
    torch = fake_torch(free_total=[(20 * GIB, 24 * GIB), (12 * GIB, 12 * GIB)], hip=hip)
    assert providers.accelerators(torch) == [
        Device(f"{kind}:0", kind, 24 * GIB, 4 * GIB),
        Device(f"{kind}:1", kind, 12 * GIB, 0),
    ]


def test_a_driver_that_fails_is_unknown_with_its_reason():
    (device,) = providers.accelerators(fake_torch(free_total=[(0, 0)], error="CUDA driver is gone\nlong story"))
    assert (*numbers(device), device.why) == (None, None, "CUDA driver is gone")


def test_a_driver_that_reports_no_memory_at_all_is_unknown():
    (device,) = providers.accelerators(fake_torch(free_total=[(0, 0)]))
    assert numbers(device) == (None, None)


@pytest.mark.parametrize(
    ("ram", "recommended", "limit_mb", "limit"),
    [
        (36 * GIB, 10 * GIB, 0, 24 * GIB),  # two thirds up to 36 GiB
        (64 * GIB, 10 * GIB, 0, 48 * GIB),  # three quarters above
        (64 * GIB, 50 * GIB, 0, 50 * GIB),  # the recommended working set is larger
        (64 * GIB, 50 * GIB, 8_192, 8 * GIB),  # a limit that is set wins, also downwards
    ],
)
def test_what_an_apple_gpu_may_wire(monkeypatch, ram, recommended, limit_mb, limit):
    monkeypatch.setattr(providers, "_sysctl", {"hw.memsize": ram, "iogpu.wired_limit_mb": limit_mb}.__getitem__)
    (device,) = providers.accelerators(fake_torch(mps=(recommended, 3 * GIB)))
    assert device == Device("mps", "mps", limit, 3 * GIB)


def test_a_mac_without_the_wired_limit_setting_has_none_set(monkeypatch):
    def sysctl(name):
        if name != "hw.memsize":
            raise OSError("unknown oid")
        return 36 * GIB

    monkeypatch.setattr(providers, "_sysctl", sysctl)
    assert providers.apple(fake_torch(mps=(GIB, 0))).total_bytes == 24 * GIB


def test_a_mac_whose_ram_cannot_be_read_is_unknown(monkeypatch):
    monkeypatch.setattr(providers, "_run", lambda *command: (_ for _ in ()).throw(OSError("no sysctl")))
    assert numbers(providers.apple(fake_torch(mps=(GIB, 0)))) == (None, None)


def test_a_macs_own_memory():
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 1000.\nPages active: 500.\n"
        'Pages inactive: 200.\nPages speculative: 30.\nPages purgeable: 4.\n"Translation faults": 12345.\n'
    )
    assert providers.macos_memory(GIB, text) == (GIB, GIB - 1234 * 16384)


def test_elsewhere_memory_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(providers.platform, "system", lambda: "Plan9")
    assert providers.cpu(tmp_path).why == "memory cannot be measured on Plan9"


def test_here_there_is_at_least_one_device():
    assert all(d.total_bytes is None or d.total_bytes > 0 for d in providers.here())
    assert providers.here()
