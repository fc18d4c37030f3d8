"""Every kernel compiles, without a GPU, for every architecture that is known, and keeps its registers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from warpbus.cuda.jit import ARCHITECTURES
from warpbus.errors import DeviceError
from warpbus.kernels.compilation import all_units
from warpbus.kernels.units import CSRC

pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")

from ptx_loads import representatives, sample

# A sample of the units: all of them would take as long as all other tests. `warpbus doctor --compile --arch` compiles
# them all. The siblings take the instructions of sm_80 and sm_120a: of each source two units stand for the others.
SIBLINGS = ("sm_86", "sm_100a")
# Bytes of spilled registers a thread that are known: NVRTC 13 gives fit_scales no more than its 96 registers there, and
# trellis_search keeps the numbers of 64 states, which with 3 bits takes a few more than the 255 that there are.
# trellis_decode for 16 rows and a gate has 96, as a block has 19 warps, and lacks some. sm90_wna16 for 256 tokens needs
# some more at the end of a tile, where gate and up are joined. wna16_decode for 16 rows and groups of 32 has 96, too.
# mla_attention for 32 heads, FP8 latents and a list of slots lacks a few of 255. sm80_wna8 in e4m3 is
# not for Hopper, whose mma.sync converts e4m3 to 16 bits, as that of sm_100a.
MOST_SPILLED = {
    ("sm_90a", "sm90_wna16"): 60,
    ("sm_90a", "sm80_wna8"): 72,
    ("sm_100a", "fit_scales"): 20,
    ("sm_100a", "sm80_wna8"): 36,
    ("sm_100a", "mla_attention"): 20,
    ("sm_90a", "trellis_search"): 100,
    ("sm_80", "trellis_decode"): 124,
    ("sm_86", "trellis_decode"): 124,
    ("sm_90a", "trellis_decode"): 72,
    ("sm_100a", "trellis_decode"): 100,
    ("sm_120a", "trellis_decode"): 44,
    ("sm_90a", "wna16_decode"): 48,
    ("sm_120a", "wna16_decode"): 28,
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_units_compile_without_spills(arch):
    units = [unit for unit in all_units() if unit.runs_on(arch)]
    if arch == "sm_89":  # the others are compiled for sm_80
        units = [unit for unit in units if not unit.runs_on("sm_80")]
    units = representatives(units) if arch in SIBLINGS else sample(units)
    with ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda unit: unit.compile(arch), units))
    assert units
    for unit, cubin in zip(units, cubins, strict=True):
        assert cubin.code.startswith(b"\x7fELF"), unit.label
        assert cubin.resources, unit.label
        assert not cubin.remarks, (unit.label, cubin.remarks)
        for name, taken in cubin.resources.items():
            spilled = max(taken.spill_stores, taken.spill_loads)
            assert spilled <= MOST_SPILLED.get((arch, name), 0), (unit.label, name, taken)
            assert 0 < taken.registers <= 255, (unit.label, name, taken)


def test_every_source_belongs_to_a_unit():
    assert set(CSRC.rglob("*.cu")) == {unit.source for unit in all_units()}


def test_hopper_units_are_for_hopper_alone():
    hopper = [unit for unit in all_units() if unit.needs == "sm_90a"]
    assert hopper
    assert all(unit.runs_on("sm_90a") and not unit.runs_on("sm_100a") and not unit.runs_on("sm_89") for unit in hopper)


@pytest.mark.parametrize(
    ("source", "macro"),
    [
        ("attention/decode.cu", "STAGE_BYTES"),
        ("attention/decode.cu", "OTHER_BYTES"),
        ("wna16/decode.cu", "STAGE_BYTES"),
        ("wna16/decode.cu", "OTHER_BYTES"),
        ("wna16/sm80_wna16.cu", "SHARED_BYTES"),
        ("wna16/sm90_wna16.cu", "SHARED_BYTES"),
        ("gemm/sm80_hgemm.cu", "SHARED_BYTES"),
        ("gemm/sm90_hgemm.cu", "SHARED_BYTES"),
        ("w8a8/sm80_w8a8.cu", "SHARED_BYTES"),
        ("w8a8/sm90_w8a8.cu", "SHARED_BYTES"),
        ("wna8/sm80_wna8.cu", "SHARED_BYTES"),
        ("wna8/sm90_wna8.cu", "SHARED_BYTES"),
        ("trellis/decode.cu", "OTHER_BYTES"),
    ],
)
def test_another_layout_of_shared_memory_does_not_compile(source, macro):
    unit = next(unit for unit in all_units() if unit.source == CSRC / source)
    other = tuple((name, str(int(text) + 16) if name == macro else text) for name, text in unit.macros)
    with pytest.raises(DeviceError, match=r"does not compile for sm_90a: .*the host asks for"):
        replace(unit, macros=other).compile("sm_90a")
