"""The GPU pool: shares of GPUs, GPUs of other machines, and running work that moves between them."""
