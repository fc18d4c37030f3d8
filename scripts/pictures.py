"""Draw the tutorial's pictures from the records in benchmarks/results, in English and in Chinese.

    .venv/bin/python scripts/pictures.py [GPU]

GPU is the end of the records' names, by default nvidia-h100-80gb-hbm3.
"""

import sys
from pathlib import Path

from warpbus.bench.catalog import BENCHMARKS
from warpbus.bench.plots import draw
from warpbus.bench.records import read
from warpbus.language import in_language

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "tutorial" / "pictures"
NAMES = ("vector-add", "matmul", "ladder", "gemm", "gemv", "linear")


def main(gpu: str = "nvidia-h100-80gb-hbm3") -> None:
    for name in NAMES:
        benchmark = BENCHMARKS[name]
        records = read(ROOT / "benchmarks" / "results" / f"{name}-{gpu}.json")
        for language, suffix in (("en", ""), ("zh", ".zh-CN")):
            with in_language(language):
                draw(records, benchmark.title, benchmark.plot, PICTURES / f"{name.replace('-', '_')}{suffix}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
