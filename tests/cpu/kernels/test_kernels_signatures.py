"""What Python declares of each kernel's parameters is what its source has: the driver cannot tell two ints apart."""

import pytest
from cuda_signatures import count, fields, kernels

from warpbus.cuda import compiled_cache
from warpbus.kernels.compilation import all_units
from warpbus.kernels.units import CSRC

SOURCES = sorted(CSRC.rglob("*.cu"))
EXAMPLE = """
struct Problem {
    int m, n;  // sides
    float eps;
};
// extern "C" __global__ void old(int a);
extern "C" __global__ void __launch_bounds__(kThreads, kRounds ? 1 : (2))
    scale(const __grid_constant__ ptx::TensorMap map, const float* __restrict__ x, ELEMENT *out,
          const Problem p, unsigned int size) {
}
extern "C" __global__ void fill(int* out) {}
"""


def declared(source):
    """The kernels that any unit of a file declares, by name."""
    return {kernel.name: kernel for unit in all_units() if unit.source == source for kernel in unit.kernels.values()}


def test_signatures_are_read_from_the_text():
    assert kernels(EXAMPLE) == {
        "scale": [
            ("map", "TensorMap"),
            ("x", "const float*"),
            ("out", "ELEMENT*"),
            ("p", "Problem"),
            ("size", "unsigned int"),
        ],
        "fill": [("out", "int*")],
    }
    assert count(EXAMPLE) == 2
    assert fields(EXAMPLE, "Problem") == [("m", "int"), ("n", "int"), ("eps", "float")]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_declared_parameters_are_those_of_the_source(source):
    text = source.read_text()
    with_includes = "".join(path.read_text() for path in compiled_cache.closure(source, CSRC))
    written = kernels(text)
    assert len(written) == count(text)
    assert declared(source).keys() == written.keys()
    for unit in (unit for unit in all_units() if unit.source == source):
        for name, kernel in unit.kernels.items():
            assert list(kernel.parameters.types.items()) == written[name], kernel.label
            for struct, of_struct in kernel.parameters.structs.items():
                assert list(of_struct.items()) == fields(with_includes, struct), (kernel.label, struct)
