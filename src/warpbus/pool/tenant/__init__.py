"""The process of a lease: it holds the lease's memory, executes what the client sends, and moves to other GPUs."""
