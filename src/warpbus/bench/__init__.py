"""How fast the operators and a whole model are, beside what others offer and what the machine allows.

A benchmark is a list of cases (`cases.py`); its records go into files of one schema (`records.py`). Of models only
these know: `decode.py`, with `decoders.py`, `plain.py` and `footprint.py`; `quantize.py`, with `quantization_*.py` and
`compressor.py`; `serving.py`, with `serving_*.py`; `parallel.py`; `train.py`, with `train_*.py`; and `pool.py`, with
`pool_*.py`. What the last five measure depends on more options than others have, so they are not in `catalog.py`.

No benchmark is loaded here: the processes that some of them time start by loading this package.
"""

from warpbus.bench.cases import Benchmark, Run, geometric_means, run
from warpbus.bench.records import Peer, Record

__all__ = ["Benchmark", "Peer", "Record", "Run", "geometric_means", "run"]
