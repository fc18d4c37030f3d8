"""Draw the tutorial's pictures from the records in benchmarks/results.

    .venv/bin/python scripts/pictures.py [GPU]

GPU is the end of the records' names, by default nvidia-h100-80gb-hbm3.
"""

import sys
from pathlib import Path

from warpbus.bench import BENCHMARKS
from warpbus.bench.plots import draw
from warpbus.bench.records import read

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "tutorial" / "pictures"


def main(gpu: str = "nvidia-h100-80gb-hbm3") -> None:
    for name, benchmark in BENCHMARKS.items():
        records = read(ROOT / "benchmarks" / "results" / f"{name}-{gpu}.json")
        draw(records, benchmark.title, benchmark.plot, PICTURES / f"{name.replace('-', '_')}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
