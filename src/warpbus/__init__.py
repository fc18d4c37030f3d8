"""Warpbus: quantize, run and serve GLM-family language models, and share the GPUs they run on."""

__version__ = "0.1.0"
