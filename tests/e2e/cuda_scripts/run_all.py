"""Runs the scripts that are named, one after the other in this process, and prints the name of each before."""

import runpy
import sys
from pathlib import Path

for path in sys.argv[1:]:
    print(f"# {Path(path).stem}", flush=True)
    runpy.run_path(path, run_name="__main__")
