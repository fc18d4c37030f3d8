"""How fast the operators and a whole model are, beside what others offer and what the machine allows.

A benchmark is a list of cases (`cases.py`); its records go into files of one schema (`records.py`). Of models only
these know: `decode.py`, with `decoders.py`, `plain.py` and `footprint.py`; `quantize.py`, with `quantization_*.py` and
`compressor.py`; `serving.py`, with `serving_*.py`; `parallel.py`; `train.py`, with `train_*.py`; and `pool.py`, with
`pool_*.py`. What the last five measure depends on more options than others have, so they are not in `BENCHMARKS`.
"""

from warpbus.bench.attention import ATTENTION
from warpbus.bench.cases import Benchmark, Run, geometric_means, run
from warpbus.bench.decode import DECODE
from warpbus.bench.dense import GEMM, GEMV, LINEAR
from warpbus.bench.elementwise import VECTOR_ADD
from warpbus.bench.matmul import LADDER, MATMUL
from warpbus.bench.quantized import W8A8, WNA16
from warpbus.bench.records import Peer, Record

BENCHMARKS = {
    each.name: each for each in (VECTOR_ADD, MATMUL, LADDER, GEMM, GEMV, LINEAR, WNA16, W8A8, ATTENTION, DECODE)
}

__all__ = ["BENCHMARKS", "Benchmark", "Peer", "Record", "Run", "geometric_means", "run"]
