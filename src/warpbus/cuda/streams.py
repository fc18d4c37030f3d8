"""Another stream for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def running_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let this thread's torch launch on a stream, behind what it launched before, and ahead of what comes then."""
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
