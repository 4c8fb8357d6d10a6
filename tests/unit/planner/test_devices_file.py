import json

import pytest

from pabench.errors import UsageError
from pabench.planner.budget import Device
from pabench.planner.devices_file import read_devices

GOOD = {"name": "a", "kind": "CUDA", "total_bytes": 10, "used_bytes": 3}


def test_a_device_is_read(tmp_path):
    (tmp_path / "d.json").write_text(json.dumps([GOOD]))
    assert read_devices(tmp_path / "d.json") == [Device("a", "cuda", 10, 3)]


@pytest.mark.parametrize("value", [None, "unknown"])
def test_a_size_may_be_unknown(tmp_path, value):
    (tmp_path / "d.json").write_text(json.dumps([GOOD | {"used_bytes": value}]))
    (device,) = read_devices(tmp_path / "d.json")
    assert (device.total_bytes, device.used_bytes) == (10, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is no JSON"),
        ("{}", "must hold a list"),
        ("[]", "with at least one"),
        ("[3]", "device 0 of .* must be an object"),
        (json.dumps([{**GOOD, "totl_bytes": 1}]), "unknown field 'totl_bytes'; did you mean 'total_bytes'"),
        (json.dumps([{k: v for k, v in GOOD.items() if k != "kind"}]), "has no kind"),
        (json.dumps([GOOD | {"total_bytes": -1}]), "total_bytes of device 0 of .* must be a whole number of bytes"),
        (json.dumps([GOOD | {"total_bytes": 1.5}]), "got 1.5"),
        (json.dumps([GOOD | {"used_bytes": True}]), "got true"),
        (json.dumps([GOOD | {"name": ""}]), "name of device 0"),
        (json.dumps([GOOD, GOOD]), "two devices named 'a'"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_devices(tmp_path / "d.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.json' cannot be read"):
        read_devices(tmp_path / "nowhere.json")
