"""`warpbus serve` in a process of its own."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def serving(model: str, *options: str, key: str = "") -> Iterator[subprocess.Popen[str]]:
    """The process, with its address as `url` and the lines of its stderr as `said`."""
    command = [sys.executable, "-m", "warpbus", "serve", model, "--port", "0", "--device", "cpu", *options]
    environment = {**os.environ, "WARPBUS_API_KEY": key, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"ready at (http://\S+?):? ", line):
                break
        else:
            pytest.fail("".join(said))
        # Its log would fill the pipe.
        reading = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
        reading.start()
        process.url, process.said, process.reading = found[1], said, reading
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            assert process.wait(90) == 0
