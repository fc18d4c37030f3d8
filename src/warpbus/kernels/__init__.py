"""Operators on tensors. `ops` is what the rest of Warpbus calls; `reference` says in plain PyTorch what each computes."""
