"""`trellis`: a linear layer whose weights are paths through a trellis, beside 4-bit weights and 16 bits.

The shapes are those of ChatGLM2-6B and GLM-4-9B, whose layers have matrices of the same sizes.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import warpbus
from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run, cublas_rival, normal
from warpbus.bench.dense import LAYERS
from warpbus.bench.quantized import Shelf, layer_case, random_weight
from warpbus.kernels.ops.packed import PackedWeight, pack
from warpbus.kernels.ops.trellis_linear import trellis_linear
from warpbus.kernels.ops.trellis_packed import PackedTrellis, pack_trellis
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import code_deviation

_VARIANTS = ("w3a16-trellis", "w2a16-trellis")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 1024)
_QUICK_ROWS = (1, 16, 128)
_FEW = (1, 2, 4, 8, 16)
_BESIDE = Scheme.parse("w4a16-g128")


def random_trellis(scheme: Scheme, n: int, k: int, device: torch.device) -> QTensor:
    """Any paths, and scales for which a product with normal numbers is about normal again."""
    words = torch.randint(-(2**31), 2**31, (n, k * scheme.bits // 32), device=device, dtype=torch.int64)
    scales = torch.rand(n, 1, device=device).add_(0.5) * (k**-0.5 / code_deviation())
    return QTensor(scheme, words.to(torch.int32), scales, None, (n, k))


def _cases(run: Run) -> list[Callable[[], Case]]:
    schemes = [Scheme.parse(name) for name in run.choose_variants(_VARIANTS, _VARIANTS)]
    rows, shelf = run.choose_sizes(_ROWS, _QUICK_ROWS), Shelf()
    return [partial(_layer, run, each, name, m, shelf) for each, name, m in itertools.product(schemes, LAYERS, rows)]


def _layer(run: Run, scheme: Scheme, name: str, m: int, shelf: Shelf) -> Case:
    dtype = run.dtype or torch.bfloat16
    n, k, _ = LAYERS[name]

    def weights(_: object) -> tuple[PackedTrellis, PackedWeight, Tensor]:
        weight = random_trellis(scheme, n, k, run.device)
        four = pack(random_weight(_BESIDE, n, k, run.device), dtype)
        return pack_trellis(weight, dtype), four, weight.dequantize(dtype)

    supply = shelf.supplier((scheme, name, dtype), weights)

    def make() -> tuple[Tensor, tuple[PackedTrellis, PackedWeight, Tensor]]:
        return normal(m, k, run.device, dtype), supply()

    rivals = [
        PeerContender(str(_BESIDE), warpbus.__version__, lambda x, each: wna16_linear(x, each[1])),
        cublas_rival(lambda x, each: F.linear(x, each[2])),
    ]
    return layer_case(run, name, m, dtype, scheme, make, lambda x, each: trellis_linear(x, each[0]), rivals)


TRELLIS = Benchmark(
    name="trellis",
    title="A linear layer with weights of a trellis",
    cases=_cases,
    plot=Plot(x="m", x_label="rows of x", panels=("variant", "shape")),
    needs_gpu=True,
    means={
        "m 1": lambda case: case["m"] == 1,
        "m 1 to 16": lambda case: case["m"] in _FEW,
        "m 32 to 1024": lambda case: case["m"] not in _FEW,
    },
)
