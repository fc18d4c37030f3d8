"""CUDA programs that know nothing of the pool: run on a part of a GPU, moved, suspended."""
