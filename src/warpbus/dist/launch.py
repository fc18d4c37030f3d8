"""Starting the processes of a job on this machine."""

import os
import sys
from collections.abc import Sequence


def relaunch(processes: int, arguments: Sequence[str]) -> None:
    """Replace this process by torchrun running `warpbus` with `arguments` in `processes` processes.

    torchrun ends the others and returns an error when one process dies. Does not return.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # Without this torchrun warns that it chose one thread a process.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "-m", "warpbus", *arguments])
