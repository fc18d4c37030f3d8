"""No kernel that starts early loads by the read-only path what the kernels ahead of it may still write."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warpbus.cuda import compiled_cache
from warpbus.cuda.kernel import Unit
from warpbus.kernels.compilation import all_units

pytest.importorskip("cuda.bindings", reason="the compiler comes with the extra cuda")

from ptx_loads import compile_ptx, kernels_of, read_only_parameters, representatives

# The parameters that a kernel may load so: weights, which no kernel of a step writes.
WEIGHTS = {
    "hgemv": {"weight"},
    "mla_queries": {"norm"},
    "mla_rope_and_cache": {"norm"},
    "moe_gemv_gated": {"weight"},
    "moe_gemv_summed": {"weight"},
    "moe_route": {"weight"},
    "sm80_wna8": {"scales", "zeros"},
}
WAIT = "griddepcontrol.wait"


def starts_early(unit):
    """Whether a kernel of the unit waits for the kernels ahead by itself."""
    texts = (path.read_text() for path in compiled_cache.closure(unit.source, unit.root) if path.name != "ptx.cuh")
    return unit.runs_on("sm_90a") and any("griddepcontrol_wait()" in text for text in texts)


def parameter_names(source: Path, kernel: str) -> list[str]:
    """The names of a kernel's parameters in its source."""
    declared = re.search(rf"__global__[^;{{]*?\b{kernel}\(([^)]*)\)", source.read_text())
    assert declared, (source, kernel)
    return [re.search(r"(\w+)\s*$", parameter)[1] for parameter in declared[1].split(",")]


def read_only_names(unit, ptx):
    """By kernel that waits, the names of the parameters that it loads by the read-only path."""
    found = {}
    for kernel, text in kernels_of(ptx).items():
        if WAIT in text:
            names = parameter_names(unit.source, kernel)
            found[kernel] = {"?" if at is None else names[at] for at in read_only_parameters(text)}
    return found


def test_kernels_that_start_early_load_weights_alone_by_the_read_only_path():
    units = representatives([unit for unit in all_units() if starts_early(unit)])
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(lambda unit: compile_ptx(unit, "sm_90a"), units))
    kernels = set()
    for unit, ptx in zip(units, texts, strict=True):
        for kernel, names in read_only_names(unit, ptx).items():
            kernels.add(kernel)
            assert names <= WEIGHTS.get(kernel, set()), (unit.label, kernel, names)
    assert kernels >= {"rms_norm", "sample", "rope_and_cache", "swiglu", "hgemv", "sm80_w8a8", "wna16_decode"}


KERNEL = """
extern "C" __global__ void mix({qualified} x, const float* __restrict__ weight, float* __restrict__ out, int n,
                               int odd) {{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const float* row = odd ? x + n * blockIdx.x : x;
    out[threadIdx.x] = row[threadIdx.x] * weight[threadIdx.x];
}}
"""


@pytest.mark.parametrize(
    ("qualified", "names"), [("const float* __restrict__", {"x", "weight"}), ("const float*", {"weight"})]
)
def test_loads_are_traced_to_their_parameters(tmp_path, qualified, names):
    source = tmp_path / "mix.cu"
    source.write_text(KERNEL.format(qualified=qualified))
    unit = Unit(source, tmp_path)
    assert read_only_names(unit, compile_ptx(unit, "sm_90a")) == {"mix": names}


def test_addresses_from_memory_are_no_parameter(tmp_path):
    source = tmp_path / "chase.cu"
    source.write_text(
        'extern "C" __global__ void chase(const float** rows, float* out) {\n'
        '    asm volatile("griddepcontrol.wait;" ::: "memory");\n'
        "    out[threadIdx.x] = __ldg(rows[blockIdx.x] + threadIdx.x);\n}\n"
    )
    unit = Unit(source, tmp_path)
    assert read_only_names(unit, compile_ptx(unit, "sm_90a")) == {"chase": {"?"}}
