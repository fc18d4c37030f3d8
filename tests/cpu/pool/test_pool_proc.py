"""What is read from /proc, from files that look like it and from the one of this machine."""

import os
import subprocess
import sys

import pytest

from warpbus.errors import DeviceError, StateError
from warpbus.pool.processes.proc import descendants, process_ids, read_process, unix_sockets

MAPS = """\
200000000-200200000 rw-s 00000000 00:06 494 /dev/nvidiactl
204c00000-204e00000 rw-s 204c00000 00:06 499 /dev/nvidia-uvm
7f2e00000000-7f2e00010000 -w-s 00000000 00:06 495 /dev/nvidia1
7f2e00010000-7f2e00020000 -w-s 00000000 00:06 495 /dev/nvidia1
7f2e1c000000-7f2e1c200000 rw-s 00000000 00:01 618 /dev/shm/nccl-AbCdEf (deleted)
7f2e2c000000-7f2e2c001000 rw-p 00000000 00:00 0
7f2e3c000000-7f2e3e000000 r-xp 00000000 08:01 77 /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""
UNIX = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00000000 0002 01 900 @/tmp/nccl-socket-0-abc
0000000000000000: 00000003 00000000 00000000 0001 03 901
0000000000000000: 00000003 00000000 00000000 0001 03 902 /run/with a space
"""


@pytest.fixture
def add(tmp_path):
    """`add(pid, ...)` puts a process into a directory like /proc."""

    def process(pid, *, parent=1, name="python", maps="", threads=(), files=(), environment=b"", unix=""):
        place = tmp_path / str(pid)
        (place / "fd").mkdir(parents=True)
        (place / "net").mkdir()
        (place / "stat").write_text(f"{pid} ({name}) S {parent} " + " ".join(map(str, range(5, 23))) + " 40\n")
        (place / "maps").write_text(maps)
        (place / "cmdline").write_bytes(b"python\0train.py\0")
        (place / "environ").write_bytes(environment)
        (place / "net" / "unix").write_text(unix)
        for number, file in enumerate(files):
            (place / "fd" / str(number)).symlink_to(file)
        for number, thread in enumerate(threads):
            (place / "task" / str(number)).mkdir(parents=True)
            (place / "task" / str(number) / "comm").write_text(thread + "\n")
        return tmp_path

    return process


def test_a_process_that_uses_a_gpu(add):
    proc = add(
        10,
        name="a (strange) name",
        parent=3,
        maps=MAPS,
        threads=("python", "cuda-EvtHandlr"),
        files=("/dev/nvidiactl", "socket:[900]", "/dev/infiniband/uverbs0"),
        environment=b"HOME=/root\0EMPTY=\0A=b=c\0nothing\0",
    )
    found = read_process(10, proc)
    assert (found.pid, found.parent, found.name) == (10, 3, "a (strange) name")
    assert found.started == 22
    assert found.command == ("python", "train.py")
    assert found.environment == {"HOME": "/root", "EMPTY": "", "A": "b=c"}
    assert found.uses_cuda
    assert found.minors == {1}
    assert found.sockets == {900}
    assert found.mapped["/dev/nvidia1"] == 2 * 2**16
    assert found.mapped["/dev/nvidia-uvm"] == 2**21
    assert "/dev/shm/nccl-AbCdEf (deleted)" in found.mapped


def test_a_forked_child_does_not_use_the_gpu(add):
    """It has inherited the mappings, and none of the threads."""
    assert not read_process(10, add(10, maps=MAPS, threads=("pt_data_worker",))).uses_cuda


def test_children_and_theirs(add):
    for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 10), (14, 1), (15, 14)):
        proc = add(pid, parent=parent)
    assert process_ids(proc) == [10, 11, 12, 13, 14, 15]
    assert sorted(descendants(10, proc)) == [11, 12, 13]
    assert descendants(12, proc) == []


def test_sockets_have_names(add):
    proc = add(10, unix=UNIX)
    assert unix_sockets(10, proc) == {900: "@/tmp/nccl-socket-0-abc", 902: "/run/with a space"}
    assert unix_sockets(11, proc) == {}


def test_no_such_process(add):
    with pytest.raises(StateError, match="process 11 does not exist"):
        read_process(11, add(10))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_somebody_elses_process(add):
    proc = add(10)
    (proc / "10" / "maps").chmod(0)
    with pytest.raises(DeviceError, match="process 10 belongs to another user"):
        read_process(10, proc)


def test_this_machine():
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "WARPBUS_TENANT": "alice"}
    ) as child:
        # The program is another before it has been loaded.
        while read_process(child.pid).environment.get("WARPBUS_TENANT") != "alice":
            pass
        found = read_process(child.pid)
        assert found.parent == os.getpid()
        assert found.command[1:] == ("-c", "input()")
        assert not found.uses_cuda
        assert child.pid in descendants(os.getpid())
        assert read_process(child.pid).started == found.started
        child.communicate(b"\n")
