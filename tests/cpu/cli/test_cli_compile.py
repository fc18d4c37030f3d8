"""`warpbus doctor --compile` without a GPU, with units of its own."""

import json

import pytest
import torch
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cli import compile as verb
from warpbus.cuda import compiled_cache, jit
from warpbus.cuda.kernel import Unit
from warpbus.errors import DeviceError, UsageError
from warpbus.kernels import compilation

GOOD = 'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= FACTOR; }\n'
SHARED = """extern "C" __global__ void reverse(float *x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[63 - threadIdx.x];
}
"""


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """`declared(name=source, ...)` are all the units there are; the cache is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def declare(needs="sm_80", **sources):
        made = []
        for name, text in sources.items():
            path = tmp_path / f"{name}.cu"
            path.write_text(text, encoding="utf-8")
            made.append(Unit(path, tmp_path, (("FACTOR", "2.0f"),), needs))
        monkeypatch.setattr(compilation, "all_units", lambda: made)

    return declare


def invoke(*words):
    found = CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False, env={"COLUMNS": "140"})
    return found.exit_code, found.stdout


def test_a_table_of_what_each_kernel_takes(declared):
    declared(good=GOOD, shared=SHARED)
    code, text = invoke("--compile", "--arch", "sm_80")
    assert code == 0
    assert f"NVRTC {jit.compiler_version()}: 2 units in" in text
    assert "good.cu FACTOR=2.0f: twice" in text
    row = next(line for line in text.splitlines() if "reverse" in line)
    registers, shared, spills = (cell.strip() for cell in row.split("│")[2:-1])
    assert int(registers) > 0
    assert (shared, spills) == ("256", "0")
    assert len(list(compiled_cache.cache_directory().glob("*.cubin"))) == 2


def test_json_for_several_architectures(declared):
    declared(good=GOOD)
    code, text = invoke("--compile", "--arch", "sm_80", "--arch", "sm_90a", "--arch", "sm_80", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["compiler"] == jit.compiler_version()
    assert [each["arch"] for each in found["units"]] == ["sm_80", "sm_90a"]
    for each in found["units"]:
        assert each["unit"] == "good.cu FACTOR=2.0f"
        assert each["error"] is None
        assert set(each["kernels"]["twice"]) == {"registers", "shared", "stack", "spill_stores", "spill_loads"}


def test_what_does_not_compile_is_reported_and_the_others_are_compiled(declared):
    declared(bad="nonsense\n", good=GOOD)
    code, text = invoke("--compile", "--arch", "sm_80")
    assert code == 1
    assert "failed" in text
    assert "bad.cu does not compile for sm_80" in text
    assert "twice" in text
    code, text = invoke("--compile", "--arch", "sm_80", "--json")
    assert code == 1
    assert [each["error"] is None for each in json.loads(text)["units"]] == [False, True]


def test_spills_are_shown_and_no_failure(declared, monkeypatch):
    declared(good=GOOD)
    spilled = jit.Cubin(b"", {"twice": jit.Resources(255, 0, 64, 40, 24)}, ("warning: wgmma serialized",))
    monkeypatch.setattr(Unit, "compile", lambda unit, arch: spilled)
    code, text = invoke("--compile", "--arch", "sm_90a")
    assert code == 0
    assert next(line for line in text.splitlines() if "twice" in line).split("│")[-2].strip() == "64"
    assert "good.cu FACTOR=2.0f (sm_90a): warning: wgmma serialized" in text


def test_units_for_another_architecture_are_left_out(declared):
    declared(needs="sm_90a", good=GOOD)
    assert [each["arch"] for each in json.loads(invoke("--compile", "--arch", "sm_90a", "--json")[1])["units"]] == [
        "sm_90a"
    ]
    with pytest.raises(DeviceError, match="sm_80: no kernel is meant for it"):
        invoke("--compile", "--arch", "sm_80")


def test_the_gpus_here_are_the_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 6), (9, 0), (8, 6)][index])
    assert verb._targets([]) == ["sm_86", "sm_90a"]
    assert verb._targets(["sm_80"]) == ["sm_80"]


def test_what_cannot_be(declared):
    declared(good=GOOD)
    with pytest.raises(UsageError, match="there is no GPU here to compile for: add --arch"):
        invoke("--compile")
    with pytest.raises(UsageError, match="--arch hopper: no architecture: give one such as sm_80"):
        invoke("--compile", "--arch", "hopper")
    with pytest.raises(UsageError, match="--arch needs --compile"):
        invoke("--arch", "sm_80")
