"""`python -m warpbus` is the command `warpbus`."""

from warpbus.cli import main

if __name__ == "__main__":
    main()
