"""A remote GPU as a device of PyTorch's in this process: its operators, transfers, connection."""
