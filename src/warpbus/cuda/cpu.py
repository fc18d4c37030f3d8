"""What the CPU of this machine is called, and which instructions it has."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name as the system tells it, such as "AMD EPYC 7B13"; its architecture where it tells none."""
    return _fact("model name") or platform.machine()


def cpu_instructions() -> frozenset[str]:
    """The instruction sets of an x86 CPU by the names of Linux, such as "avx2"; empty for others."""
    return frozenset(_fact("flags").split())


def _fact(name: str) -> str:
    """What the system tells about the first core under a name, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")
