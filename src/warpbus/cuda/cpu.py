"""What the CPU of this machine is called."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name as the system tells it, such as "AMD EPYC 7B13"; its architecture where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
