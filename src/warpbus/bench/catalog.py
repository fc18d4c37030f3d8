"""The benchmarks whose options are those of all: of the operators, and of a model that generates."""

from warpbus.bench.attention import ATTENTION
from warpbus.bench.decode import DECODE
from warpbus.bench.dense import GEMM, GEMV, LINEAR
from warpbus.bench.elementwise import VECTOR_ADD
from warpbus.bench.experts import MOE
from warpbus.bench.latents import MLA
from warpbus.bench.matmul import LADDER, MATMUL
from warpbus.bench.quantized import W8A8, WNA8, WNA16
from warpbus.bench.trellis import TRELLIS

BENCHMARKS = {
    each.name: each
    for each in (
        VECTOR_ADD,
        MATMUL,
        LADDER,
        GEMM,
        GEMV,
        LINEAR,
        WNA16,
        WNA8,
        W8A8,
        TRELLIS,
        MOE,
        ATTENTION,
        MLA,
        DECODE,
    )
}
