"""The number of shares that work is divided into, independent of the number of processes."""

# Each share is processed as a whole by one process. The result of a share, and the order in which shares are added up
# (`TreeSum`), are then bit-identical in a job of 1, 2 or 8 processes. A power of two, so that 1, 2, 4 and 8 processes
# have equal loads.
SHARES = 8
