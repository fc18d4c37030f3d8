"""The devices of this machine. Imports without CUDA and without a GPU."""
