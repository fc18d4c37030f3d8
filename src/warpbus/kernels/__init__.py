"""Operators on tensors: `ops` is what Warpbus calls, `reference` says in plain PyTorch what each computes."""
