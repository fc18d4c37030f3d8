"""Benchmarks of the operators and of whole models, compared with other libraries and the limits of the machine.

A benchmark is a list of cases (`cases.py`); its records go into files of one schema (`records.py`). The benchmarks of
operators and of decoding, which share their options, are in `catalog.py`. Those of whole models have options of their
own (`options.py`): `quantize.py`, `serving.py`, `parallel.py`, `train.py` and `pool.py`, each with the modules named
after it.

The public names are imported on first use: the command line reads the options without loading torch, and benchmarks
time processes that start by loading this package.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

if TYPE_CHECKING:
    from warpbus.bench.cases import Benchmark, Run, geometric_means, run
    from warpbus.bench.records import Peer, Record

__all__ = ["Benchmark", "Peer", "Record", "Run", "geometric_means", "run"]

__getattr__ = lazy_names(
    __name__,
    cases=("Benchmark", "Run", "geometric_means", "run"),
    records=("Peer", "Record"),
)
