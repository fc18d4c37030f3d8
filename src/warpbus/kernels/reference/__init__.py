"""Every operator in plain PyTorch: the oracle of the tests and the path taken on the CPU."""
