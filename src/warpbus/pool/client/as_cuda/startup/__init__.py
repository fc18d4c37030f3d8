"""The directory that `pool run --remote` puts first into PYTHONPATH: Python executes its sitecustomize.py."""

from pathlib import Path

DIRECTORY = Path(__file__).parent
