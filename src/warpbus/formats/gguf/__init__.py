"""GGUF, the single-file format of llama.cpp: read as a model directory, and written."""
