"""Inline PTX for programs on the CPU: `asm` statements of CUDA C++ become calls of `on_cpu/ptx.h`."""
