"""The command `warpbus`, also as `python -m warpbus`."""

import signal
import sys

try:
    from warpbus.cli import main
except KeyboardInterrupt:  # Ctrl-C while Python loads the program, before anything could have been lost
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    main()
