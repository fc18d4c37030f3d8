"""What can be known of a kernel without a GPU: where its parameters lie."""

from pathlib import Path

import pytest

from warpbus.cuda.kernel import Unit, runs_on


@pytest.mark.parametrize(
    ("parameters", "offsets"),
    [
        ("P", (0,)),
        ("PiPf", (0, 8, 16, 24)),
        ("iqi", (0, 8, 16)),
        ("128s128sPii", (0, 128, 256, 264, 268)),
    ],
)
def test_parameters_lie_where_c_puts_them(parameters, offsets):
    kernel = Unit(Path("/source/x.cu"), Path("/source")).kernel("x", parameters)
    assert kernel._offsets == offsets


@pytest.mark.parametrize(
    ("arch", "needs", "expected"),
    [
        ("sm_80", "sm_80", True),
        ("sm_86", "sm_80", True),
        ("sm_120a", "sm_89", True),
        ("sm_80", "sm_89", False),
        ("sm_90a", "sm_90a", True),
        ("sm_100a", "sm_90a", False),
        ("sm_89", "sm_90a", False),
    ],
)
def test_what_runs_on_which_architecture(arch, needs, expected):
    assert runs_on(arch, needs) is expected


def test_label_names_file_and_macros():
    assert Unit(Path("/source/gemm/x.cu"), Path("/source"), (("TILE", "64"),)).label == "gemm/x.cu TILE=64"
