"""The process of a lease: holds the lease's memory, executes the client's operators, and migrates to other GPUs."""
