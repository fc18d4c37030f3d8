"""Settings of all tests."""

import os

# As the command does: torch's CPU threads sleep while they wait, whatever else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
