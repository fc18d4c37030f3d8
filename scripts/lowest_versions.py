"""Install the lowest allowed version of each direct dependency into the environment that runs this script.

    .venv/bin/python scripts/lowest_versions.py [EXTRA ...]

A bound of `pyproject.toml` that is too low shows in the tests then, not at a user's. torch is left as it is: its lowest
version is several gigabytes, and the other packages do not depend on which one is there.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT = ("torch", "warpbus")

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(.*)")
_LOWER_BOUND = re.compile(r">=([\w.]+)")


def main(extras: list[str]) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = lowest(project["dependencies"])
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        requirements = project["optional-dependencies"][extra]
        pins += lowest(requirements)
        waiting += [name for requirement in requirements for name in own_extras(requirement)]
    print("\n".join(pins), flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *pins]).returncode


def lowest(requirements: list[str]) -> list[str]:
    """The requirements with their lower bounds as the versions; those in `LEFT` are left out."""
    pins = []
    for requirement in requirements:
        name, _, bounds = split(requirement)
        if name not in LEFT:
            bound = _LOWER_BOUND.search(bounds)
            if bound is None:
                raise SystemExit(f"pyproject.toml: {requirement}: has no lower bound: write {name}>=VERSION")
            pins.append(f"{name}=={bound[1]}")
    return pins


def own_extras(requirement: str) -> list[str]:
    """The extras of this package that a requirement such as `warpbus[cuda,serve]` names."""
    name, extras, _ = split(requirement)
    return extras.split(",") if name == "warpbus" else []


def split(requirement: str) -> tuple[str, str, str]:
    """The name, the extras and the bounds of a requirement."""
    found = _REQUIREMENT.fullmatch(requirement)
    assert found is not None, requirement
    return found[1], found[2] or "", found[3]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
