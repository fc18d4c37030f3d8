"""Arenas: on the CPU as they are; those of GPUs over a driver that keeps account of every call."""

import gc
import os
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.cuda.vmm import PIECE, Arena, DeviceSpace, mapped_bytes
from warpbus.errors import DeviceError, UsageError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 3)
MiB = 2**20
PAGE = 2 * MiB


class Driver:
    """A GPU of `total` bytes that knows what is reserved, had and mapped, and refuses what a real one would.

    `failing` maps the names of functions to how many calls go well before one fails.
    """

    granularity = PAGE

    def __init__(self, total=8 * PIECE):
        self.total = total
        self.failing = {}
        self.cached = 0
        self.ranges = {}
        self.memory = {}
        self.mapped = {}
        self.allowed = set()
        self.calls = []

    def _called(self, name):
        self.calls.append(name)
        left = self.failing.get(name)
        if left is not None:
            self.failing[name] = left - 1
            if left == 0:
                del self.failing[name]
                raise DeviceError(f"{name}: failure on request")

    def reserve(self, size):
        self._called("reserve")
        address = 2**40 * (len(self.ranges) + 1)
        self.ranges[address] = size
        return address

    def free(self, address, size):
        self._called("free")
        assert self.ranges.pop(address) == size
        assert not self.mapped

    def create(self, size):
        self._called("create")
        assert size > 0
        assert size % PAGE == 0
        if size > self.left():
            raise DeviceError("CUDA_ERROR_OUT_OF_MEMORY")
        handle = max(self.memory, default=0) + 1
        self.memory[handle] = size
        return handle

    def release(self, handle):
        self._called("release")
        assert all(mapped != handle for _, mapped in self.mapped.values())
        del self.memory[handle]

    def map(self, address, size, handle):
        self._called("map")
        assert self.memory[handle] == size
        assert all(address + size <= other or other + had <= address for other, (had, _) in self.mapped.items())
        assert any(start <= address and address + size <= start + had for start, had in self.ranges.items())
        self.mapped[address] = size, handle

    def allow(self, address, size):
        self._called("allow")
        inside = sorted(place for place in self.mapped if address <= place < address + size)
        assert sum(self.mapped[place][0] for place in inside) == size
        self.allowed |= set(inside)

    def unmap(self, address, size):
        self._called("unmap")
        assert self.mapped.pop(address)[0] == size
        self.allowed.discard(address)

    def export(self, handle):
        self._called("export")
        return os.open(os.devnull, os.O_RDONLY)

    def left(self):
        return self.total - self.cached - sum(self.memory.values())

    def trim(self):
        self.calls.append("trim")
        self.cached = 0

    def synchronize(self):
        self.calls.append("synchronize")


def consistent(space, driver):
    """What the space says is what the driver knows: pieces without gaps, all usable, nothing beside."""
    places = sorted(driver.mapped)
    assert places == [] or places[0] == space.address
    assert all(place + driver.mapped[place][0] == following for place, following in pairwise(places))
    assert sum(size for size, _ in driver.mapped.values()) == sum(driver.memory.values()) == space.mapped
    assert driver.allowed == set(places)


def test_a_gpu_grows_by_large_pieces():
    driver = Driver()
    space = DeviceSpace(2**40 - 1, GPU, driver)
    assert (space.reserved, space.mapped, space.page) == (2**40, 0, PAGE)
    space.grow(2 * PIECE + 3 * PAGE)
    assert [size for size, _ in space.pieces] == [PIECE, PIECE, 3 * PAGE]
    assert driver.calls.count("allow") == 1
    space.grow(2 * PIECE + 4 * PAGE)
    assert [size for size, _ in space.pieces] == [PIECE, PIECE, 3 * PAGE, PAGE]
    assert "synchronize" not in driver.calls
    consistent(space, driver)


def test_a_gpu_shrinks_by_whole_pieces_after_waiting():
    driver = Driver()
    space = DeviceSpace(2**30, GPU, driver)
    space.grow(3 * PIECE)
    space.shrink(2 * PIECE + PAGE)
    assert space.mapped == 3 * PIECE
    assert "synchronize" not in driver.calls
    space.shrink(PIECE + PAGE)
    assert space.mapped == 2 * PIECE
    assert driver.calls.index("synchronize") < driver.calls.index("unmap")
    space.shrink(PIECE)
    assert space.mapped == PIECE
    space.shrink(0)
    assert space.mapped == 0
    consistent(space, driver)


@pytest.mark.parametrize("call", ["create", "map", "allow"])
@pytest.mark.parametrize("goes_well", [0, 2])
def test_a_growth_that_fails_twice_is_undone(call, goes_well):
    driver = Driver()
    space = DeviceSpace(2**30, GPU, driver)
    space.grow(PIECE)
    before = list(space.pieces)

    driver.failing = {call: 0 if call == "allow" else goes_well}
    # It fails again after torch has given back what it keeps.
    driver.trim = lambda: driver.failing.update({call: 0})
    with pytest.raises(DeviceError) as raised:
        space.grow(5 * PIECE)
    message = str(raised.value)
    assert message.startswith(f"cuda:3: {4 * PIECE:,} bytes more were asked for, {7 * PIECE:,} are free, {PIECE:,} are")
    assert "\n" not in message
    assert space.pieces == before
    consistent(space, driver)
    space.grow(5 * PIECE)
    consistent(space, driver)


def test_an_export_that_fails_leaves_no_descriptor_open():
    driver = Driver()
    space = DeviceSpace(2**30, GPU, driver)
    space.grow(3 * PIECE)
    before = sorted(os.listdir("/proc/self/fd"))
    descriptors = space.export()
    assert len(descriptors) == len(set(descriptors)) == 3
    for descriptor in descriptors:
        os.close(descriptor)
    driver.failing = {"export": 2}
    with pytest.raises(DeviceError, match="export: failure on request"):
        space.export()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_what_torch_keeps_is_asked_for_before_giving_up():
    driver = Driver()
    space = DeviceSpace(2**30, GPU, driver)
    driver.cached = 6 * PIECE
    space.grow(4 * PIECE)
    assert driver.calls.count("trim") == 1
    assert space.mapped == 4 * PIECE
    consistent(space, driver)


def test_a_space_that_nobody_refers_to_goes_back():
    driver = Driver()
    space = DeviceSpace(2**30, GPU, driver)
    space.grow(2 * PIECE + PAGE)
    del space
    gc.collect()
    assert not driver.ranges
    assert not driver.memory
    assert not driver.mapped
    assert driver.calls.index("synchronize") < driver.calls.index("unmap")


STEPS = st.lists(
    st.tuples(st.integers(0, 12 * 32), st.sampled_from(["create", "map", "allow", None]), st.integers(0, 4)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_happens_the_account_is_right(steps):
    driver = Driver()
    space = DeviceSpace(12 * PIECE, GPU, driver)
    for pages, call, goes_well in steps:
        wanted, before = pages * PAGE, list(space.pieces)
        driver.failing = {call: goes_well}
        if wanted <= space.mapped:
            space.shrink(wanted)
            assert wanted <= space.mapped < wanted + PIECE or wanted == space.mapped
        else:
            try:
                space.grow(wanted)
                assert space.mapped == wanted
            except DeviceError:
                assert space.pieces == before
        consistent(space, driver)


def resident():
    """Bytes of main memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_on_the_cpu_addresses_cost_nothing_and_shrinking_returns_memory():
    arena = Arena(2**40, CPU)
    assert (arena.reserved, arena.mapped) == (2**40, 0)
    whole = arena.tensor((2**40,), torch.uint8)
    before = resident()
    arena.resize(64 * MiB)
    assert resident() - before < 8 * MiB
    whole[: 64 * MiB] = 7
    assert resident() - before > 60 * MiB
    arena.resize(16 * MiB)
    assert resident() - before < 24 * MiB
    assert (whole[: 16 * MiB] == 7).all()
    arena.resize(64 * MiB)
    assert (whole[: 16 * MiB] == 7).all()
    assert (whole[16 * MiB : 64 * MiB] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int64])
def test_tensors_share_the_arena(dtype):
    arena = Arena(MiB, CPU)
    arena.resize(MiB)
    tensor = arena.tensor((3, 4, 5), dtype, offset=4096)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((3, 4, 5), dtype, CPU)
    assert tensor.is_contiguous()
    flat = arena.tensor((MiB,), torch.uint8)
    assert tensor.data_ptr() == flat.data_ptr() + 4096
    tensor.view(torch.uint8)[:] = 1
    assert flat.count_nonzero() == tensor.nbytes
    assert flat[4096 : 4096 + tensor.nbytes].all()
    assert arena.tensor((0, 4), dtype).shape == (0, 4)
    assert arena.tensor((), dtype, offset=4096) == tensor[0, 0, 0]


def test_a_tensor_keeps_the_memory_and_nothing_else_does():
    before = mapped_bytes(CPU)
    arena = Arena(MiB, CPU)
    arena.resize(MiB)
    space = weakref.ref(arena._space)
    view = arena.tensor((MiB,), torch.uint8)[100:200]
    view.fill_(9)
    del arena
    gc.collect()
    assert (view == 9).all()
    assert mapped_bytes(CPU) == before + MiB
    del view
    gc.collect()
    assert space() is None
    assert mapped_bytes(CPU) == before


def test_closing_twice_and_then_resizing():
    arena = Arena(MiB, CPU)
    arena.resize(MiB)
    kept = arena.tensor((10,), torch.float32)
    arena.close()
    arena.close()
    assert arena.mapped == 0
    assert (kept == 0).all()
    with pytest.raises(UsageError, match="closed"):
        arena.resize(1)


def test_sizes_are_rounded_up_to_pages():
    arena = Arena(arena_size := 3 * 4096 + 1, CPU)
    assert arena.reserved == 4 * arena.page > arena_size
    arena.resize(1)
    assert arena.mapped == arena.page
    arena.resize(arena.page + 1)
    assert arena.mapped == 2 * arena.page
    arena.resize(0)
    assert arena.mapped == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda arena: arena.resize(-1), "cannot have -1"),
        (lambda arena: arena.resize(MiB + 1), "cannot have 1,048,577"),
        (lambda arena: arena.tensor((MiB // 4 + 1,), torch.float32), "1,048,580 bytes from 0 on: the arena ends at"),
        (lambda arena: arena.tensor((1,), torch.float32, -4), "the arena ends at"),
        (lambda arena: arena.tensor((1,), torch.float32, 2), "give a multiple of 4"),
        (lambda arena: Arena(0, CPU), "reserve at least one"),
    ],
)
def test_what_cannot_be_meant(act, message):
    with pytest.raises(UsageError, match=message):
        act(Arena(MiB, CPU))


def test_more_than_there_is():
    with pytest.raises(DeviceError, match="cannot be reserved"):
        Arena(2**62, CPU)
    arena = Arena(2**45, CPU)
    arena.resize(MiB)
    with pytest.raises(DeviceError, match=f"cpu: {2**45 - MiB:,} bytes more were asked for"):
        arena.resize(2**45)
    assert arena.mapped == MiB
    with pytest.raises(DeviceError, match="not exported"):
        arena.export()
