"""Benchmarks of the operators and of whole models, compared with other libraries and the limits of the machine.

A benchmark is a list of cases (`cases.py`); its records go into files of one schema (`records.py`). The benchmarks of
operators and of decoding, which share their options, are in `catalog.py`. Those of whole models have options of their
own (`options.py`): `quantize.py`, `serving.py`, `parallel.py`, `train.py` and `pool.py`, each with the modules named
after it.

The public names are imported on first use: the command line reads the options without loading torch, and benchmarks
time processes that start by loading this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpbus.bench.cases import Benchmark, Run, geometric_means, run
    from warpbus.bench.records import Peer, Record

__all__ = ["Benchmark", "Peer", "Record", "Run", "geometric_means", "run"]

# No public name may equal the name of a module of this package, which would hide it.
_FILES = {
    "Benchmark": "cases",
    "Peer": "records",
    "Record": "records",
    "Run": "cases",
    "geometric_means": "cases",
    "run": "cases",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'warpbus.bench' has no attribute {name!r}")
    return getattr(importlib.import_module(f"warpbus.bench.{_FILES[name]}"), name)
