"""Streams and slots without a GPU: a stream is a thread, and slots are memory of this process."""

import ctypes
import queue
import threading
import time
from contextlib import nullcontext

import torch

from warpbus.pool.tenant.device_link import DEVICE_SLOT, DEVICE_SLOTS


class ThreadMark:
    def __init__(self):
        self._reached = threading.Event()

    def query(self):
        return self._reached.is_set()

    def reach(self):
        self._reached.set()

    def reached(self, seconds=60):
        return self._reached.wait(seconds)


class ThreadStream:
    """Does in a thread what is launched, in order. Operators of torch run in the caller's thread: an incoming stream is
    waited for before they do."""

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            function, *arguments = self._tasks.get()
            function(*arguments)

    def current(self):
        return nullcontext()

    def follow(self):
        pass

    def mark(self):
        mark = ThreadMark()
        self._tasks.put((mark.reach,))
        return mark

    def done(self, mark):
        return mark.query()

    def after(self, mark):
        self._tasks.put((mark.reached,))

    def join(self, mark):
        mark.reached()

    def copy(self, target, source, nbytes):
        self._tasks.put((ctypes.memmove, target, source, nbytes))

    def wait(self, word, value):
        self._tasks.put((_wait, word, value))

    def write(self, word, value):
        self._tasks.put((_write, word, value))


class WaitedStream(ThreadStream):
    """Is empty when a call returns, as an incoming stream has to be, unless what it waits for does not come."""

    def copy(self, target, source, nbytes):
        super().copy(target, source, nbytes)
        self.mark().reached(3)

    def after(self, mark):
        super().after(mark)
        self.mark().reached(3)


def _wait(word, value):
    while ctypes.c_int32(ctypes.c_uint32.from_address(word).value - value).value < 0:
        time.sleep(0.0005)


def _write(word, value):
    ctypes.c_uint32.from_address(word).value = value


class HostSlots:
    """The slots of a GPU that is not there. All that exist, by handle, are in `made`."""

    def __init__(self, made, uuid):
        self._memory = torch.zeros(DEVICE_SLOTS * DEVICE_SLOT, dtype=torch.uint8)
        self.own, self.uuid = self._memory.data_ptr(), bytes([uuid]) * 16
        self.handle = bytes([len(made) + 1]) * 64
        self.opened, self.freed = [], False
        self._made = made
        made[self.handle] = self

    def open(self, handle):
        self.opened.append(handle)
        return self._made[handle].own

    def close(self):
        self.opened.clear()

    def free(self):
        self.freed = True

    def word(self, page, offset):
        return page.data_ptr() + offset
