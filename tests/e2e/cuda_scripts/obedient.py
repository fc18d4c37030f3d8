"""Prints its arguments and the device of a tensor, and waits for a signal on request."""

import signal
import sys

import torch

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
print(sys.argv[1:], torch.ones(1).cuda().device, flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(int(sys.argv[1]))
