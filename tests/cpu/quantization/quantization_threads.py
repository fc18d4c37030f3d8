"""The processes of a job as threads of this one: what they exchange is theirs, and nothing has to be started."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warpbus.dist import Group

_SECONDS = 60.0


@dataclass
class _Between:
    """What is on its way from one to another."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    queues: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=dict)

    def queue(self, sender: int, receiver: int) -> queue.Queue[Tensor]:
        with self.lock:
            return self.queues.setdefault((sender, receiver), queue.Queue())


@dataclass(frozen=True)
class ThreadGroup(Group):
    """A `Group` whose members are threads."""

    between: _Between = field(default_factory=_Between)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.gather(tensor[None].clone()).sum(0)) if self.world > 1 else tensor

    def exchange(self, sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]]) -> None:
        for rank, tensor in sent:
            self.between.queue(self.rank, rank).put(tensor.clone())
        for rank, tensor in received:
            tensor.copy_(self.between.queue(rank, self.rank).get(timeout=_SECONDS))

    def _lengths(self, own: int) -> list[int]:
        others = [rank for rank in range(self.world) if rank != self.rank]
        found = [torch.tensor([own]) for _ in range(self.world)]
        self.exchange([(rank, found[self.rank]) for rank in others], [(rank, found[rank]) for rank in others])
        return [int(each) for each in found]


def together(world: int, job: Callable[[Group], Any]) -> list[Any]:
    """Run `job` as every member of a group of `world`; gives what each returns, by rank."""
    between, device = _Between(), torch.device("cpu")
    with ThreadPoolExecutor(world) as pool:
        members = [ThreadGroup(rank, world, device, between=between) for rank in range(world)]
        return [done.result() for done in [pool.submit(job, member) for member in members]]
