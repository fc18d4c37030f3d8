"""Draw the schematic pictures of the tutorial and of other documents, in English and in Chinese.

python scripts/draw.py            # writes docs/tutorial/drawings/NAME.svg and NAME.zh-CN.svg
"""

import sys
from collections.abc import Callable
from pathlib import Path

from drawings import machine, models, products, scaling, threads
from drawings.svg import Drawing, Say

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "docs" / "tutorial" / "drawings"

DRAWINGS: tuple[Callable[[Say], Drawing], ...] = (
    *(
        machine.cpu_gpu,
        machine.latency_throughput,
        machine.memory_hierarchy,
        machine.roofline,
        machine.streams,
        machine.virtual_memory,
    ),
    *(threads.grid_block_thread, threads.coalescing, threads.bank_conflicts, threads.reduction_tree),
    *(
        products.tiles,
        products.register_tiles,
        products.mma_fragments,
        products.wgmma,
        products.pipeline,
        products.im2col,
        products.layer,
    ),
    *(models.gptq_sweep, models.paged_cache, models.migrating_lease),
    *(scaling.graph_launch, scaling.card_memory, scaling.ring_all_reduce, scaling.column_row_split),
)


def files() -> dict[str, str]:
    """The text of each file by its name."""
    found = {}
    for draw in DRAWINGS:
        found[f"{draw.__name__}.svg"] = draw(lambda english, _: english).svg()
        found[f"{draw.__name__}.zh-CN.svg"] = draw(lambda _, chinese: chinese).svg()
    return found


def main() -> int:
    PLACE.mkdir(exist_ok=True)
    for name, text in files().items():
        (PLACE / name).write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
