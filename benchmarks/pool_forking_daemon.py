"""`warpbus` whose pool daemon forks the processes of leases, in place of starting interpreters: importing torch again
for each takes seconds, of which hundreds of killed processes would need hours. For CPU pools; nothing else differs:

    python benchmarks/pool_forking_daemon.py pool serve --cpu-memory 4GB
"""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from warpbus.__main__ import main
from warpbus.pool.daemon import tenant_processes
from warpbus.pool.tenant import process


class ForkedProcess:
    """What `tenant_processes` uses of `subprocess.Popen`, with the meaning that it has there."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become(command[-1], pass_fds[0], env)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _become(code: str, descriptor: int, environment: Mapping[str, str]) -> None:
    """In the child: run the program of a lease's process, and do not return."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    process._warm()
    tenant_processes.subprocess = SimpleNamespace(Popen=ForkedProcess, DEVNULL=None)  # type: ignore[assignment]
    sys.exit(main())
