"""How finely work is cut, whatever the number of processes."""

# Work is cut into the same shares whatever the number of processes, and a share goes to one process as a whole. What a
# share gives, and the order in which shares are added up (`TreeSum`), are then the same in a job of 1, 2 or 8
# processes, bit for bit. A power of two, so that 1, 2, 4 and 8 processes have equal loads.
SHARES = 8
