"""`cuda` in an unmodified PyTorch program as a GPU that is leased from a pool: `warpbus pool run --remote`."""
