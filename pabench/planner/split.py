"""The best split of layers over devices: contiguous, in the devices' order, with the most blocks on the tightest."""

from __future__ import annotations

from collections.abc import Callable

TIE_BREAK = "of equal splits the one that uses most devices, then the one with the fewest layers on the first devices"
UNBOUNDED = 1 << 62  # more blocks than any memory holds

Holds = Callable[[int, int, int, int], bool]
"""``holds(device, first, count, blocks)``: whether the device can hold ``blocks`` blocks of those layers. Fewer layers
or fewer blocks must never turn yes into no."""


def best_split(num_layers: int, num_devices: int, holds: Holds) -> tuple[int, ...]:
    """Layers of each device, 0 where a device is left out. Bisects the number of blocks: if each device in turn takes
    as many layers as it can hold and all are placed, that many blocks fit."""

    def most(device: int, first: int, blocks: int) -> int:
        low, high = 0, num_layers - first
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(device, first, middle, blocks) else (low, middle - 1)
        return low

    def places_all(blocks: int) -> bool:
        first = 0
        for device in range(num_devices):
            first += most(device, first, blocks)
        return first == num_layers

    low, high = 0, UNBOUNDED
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if places_all(middle) else (low, middle - 1)
    return _break_tie(num_layers, num_devices, lambda device, first: most(device, first, low))


def _break_tie(num_layers: int, num_devices: int, most: Callable[[int, int], int]) -> tuple[int, ...]:
    """Of all splits in which no device has more than ``most(device, first layer)``: the one of ``TIE_BREAK``."""
    impossible = -1
    used = [[impossible] * num_layers + [0]]  # used[device][first]: most devices that the rest can be spread over
    for device in reversed(range(num_devices)):
        row = []
        for first in range(num_layers + 1):
            counts = range(most(device, first) + 1) if first < num_layers else range(1)
            rest = [(count > 0) + used[0][first + count] for count in counts if used[0][first + count] != impossible]
            row.append(max(rest, default=impossible))
        used.insert(0, row)
    split: list[int] = []
    for device in range(num_devices):
        first = sum(split)
        wanted = used[device][first]
        for count in range(num_layers - first + 1):
            rest_used = used[device + 1][first + count]
            if rest_used != impossible and (count > 0) + rest_used == wanted:
                split.append(count)
                break
    return tuple(split)
