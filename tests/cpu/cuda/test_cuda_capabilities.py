"""The table of what architectures can do, also for those that have no row of their own."""

import pytest

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import ARCHITECTURES


@pytest.mark.parametrize(
    ("arch", "able"),
    [
        ("sm_75", set()),
        ("sm_80", {"mma"}),
        ("sm_86", {"mma"}),
        ("sm_89", {"mma", "e4m3"}),
        ("sm_90a", {"mma", "e4m3", "tma", "clusters", "dependent_launch", "wgmma"}),
        ("sm_100a", {"mma", "e4m3", "tma", "clusters", "dependent_launch"}),
        ("sm_103a", {"mma", "e4m3", "tma", "clusters", "dependent_launch"}),
        ("sm_120a", {"mma", "e4m3", "tma", "clusters", "dependent_launch"}),
    ],
)
def test_what_an_architecture_can_do(arch, able):
    row = vars(capabilities(arch))
    assert {name for name, value in row.items() if value is True} == able


def test_wgmma_is_of_hopper_alone():
    assert [arch for arch in ARCHITECTURES if capabilities(arch).wgmma] == ["sm_90a"]
