"""Runs of CUDA programs on the CPU with all checks."""

import re
from pathlib import Path

from warpbus.cuda import programs
from warpbus.cuda.findings import explain

START = "#include <cstdio>\n#include <cassert>\n#include <cuda_runtime.h>\n"


def run_checked(place: Path, text: str) -> str:
    """What a program prints, the same in both orders of threads, or the explanation of its mistake."""
    source = place / "program.cu"
    source.write_text(START + text, encoding="utf-8")
    found = programs.run_in_orders(source, checks=True)
    if mistake := found[-1].mistake:
        assert re.search("[\u4e00-\u9fff]", explain(mistake, "zh"))
        return explain(mistake)
    assert [(each.code, each.errors) for each in found] == [(0, "")] * 2
    assert found[0].output == found[1].output
    return found[0].output
