"""GPUs that plans are made for without being there: their memory, and how fast a copy reads and writes it."""

from dataclasses import dataclass

from warpbus.errors import UsageError

_LANES = {4: 31.5e9, 5: 63e9}
"""Bytes per second and direction of 16 lanes of PCI Express, by its generation."""

_LINK_SHARE = 0.8
"""The share of the link's bandwidth that reading the host's pinned memory is expected to reach."""

_COPY_SHARE = 0.9
"""The share of the data sheet's bandwidth that a copy reached: 3.01 of 3.35 TB/s on an H100, 4.3 of 4.8 on an H200."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: as flags name it.
        device: its name by the driver.
        memory: bytes, by its data sheet.
        bandwidth: bytes per second that a copy reads and writes.
        link: bytes per second that it reads of pinned memory of the host.
        measured: whether `bandwidth` was measured, and steps of models were timed; otherwise it is `_COPY_SHARE` of the
            data sheet's.
    """

    name: str
    device: str
    memory: int
    bandwidth: float
    link: float
    measured: bool = False


def _link(generation: int) -> float:
    return _LANES[generation] * _LINK_SHARE


def _by_data_sheet(name: str, device: str, gigabytes: int, gigabytes_per_second: float, generation: int = 4) -> Card:
    return Card(name, device, gigabytes * 10**9, gigabytes_per_second * 1e9 * _COPY_SHARE, _link(generation))


CARDS = {
    card.name: card
    for card in (
        Card("h100", "NVIDIA H100 80GB HBM3", 80 * 10**9, 3.01e12, _link(5), measured=True),
        Card("h200", "NVIDIA H200", 141 * 10**9, 4.3e12, _link(5), measured=True),
        _by_data_sheet("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, 1555),
        _by_data_sheet("a100-80gb", "NVIDIA A100-SXM4-80GB", 80, 2039),
        _by_data_sheet("b200", "NVIDIA B200", 180, 8000, generation=5),
        _by_data_sheet("l4", "NVIDIA L4", 24, 300),
        _by_data_sheet("l40s", "NVIDIA L40S", 48, 864),
        _by_data_sheet("rtx-3090", "NVIDIA GeForce RTX 3090", 24, 936),
        _by_data_sheet("rtx-4090", "NVIDIA GeForce RTX 4090", 24, 1008),
        _by_data_sheet("rtx-5090", "NVIDIA GeForce RTX 5090", 32, 1792, generation=5),
    )
}
"""By name. Sources: docs/benchmark_results.md, "Decode steps", for measured cards, NVIDIA's data sheets for others."""


def card_named(name: str) -> Card:
    """A card of `CARDS`, in upper or lower case, or by the driver's name.

    Raises:
        UsageError: no such card; the message lists them.
    """
    for card in CARDS.values():
        if name.lower() in (card.name, card.device.lower()):
            return card
    raise UsageError(f"GPU {name!r} is not known: choose the nearest of {', '.join(CARDS)}")
