"""Arenas on a GPU: what the driver says of their memory, what kernels and graphs see of it."""

import ctypes
import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from warpbus.cuda import driver
from warpbus.cuda.dlpack import bytes_at
from warpbus.cuda.memory_size import rounded_up
from warpbus.cuda.vmm import PIECE, Arena, mapped_bytes
from warpbus.cuda.vmm_driver import VirtualMemory
from warpbus.errors import DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)
MiB = 2**20
GiB = 2**30
SLACK = 32 * MiB  # tables of pages, and what the driver takes for itself


def used():
    """Bytes of the GPU that are not free, by the driver's account, without what nobody refers to."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free


@pytest.fixture
def account():
    """`account()`: bytes that were taken since the test began: by the driver's account and by that of all arenas."""
    warm = Arena(GiB, GPU)
    warm.resize(PIECE)
    warm.tensor((PIECE,), torch.uint8).fill_(1)
    warm.close()
    del warm
    taken, mapped = used(), mapped_bytes(GPU)
    return lambda: (used() - taken, mapped_bytes(GPU) - mapped)


def test_growth_keeps_content_and_addresses():
    arena = Arena(2**40, torch.device("cuda"))
    assert (arena.device, arena.reserved, arena.mapped) == (GPU, 2**40, 0)
    assert arena.page % (2 * MiB) == 0
    whole = arena.tensor((2**40,), torch.uint8)
    place = whole.data_ptr()
    assert whole.device == GPU
    for start in range(0, 500, 100):
        arena.resize((start + 100) * MiB)
        assert arena.mapped == (start + 100) * MiB
        whole[start * MiB : (start + 100) * MiB] = start // 100 + 1
    assert arena.tensor((1,), torch.uint8).data_ptr() == whole.data_ptr() == place
    for start in range(0, 500, 100):
        assert (whole[start * MiB : (start + 100) * MiB] == start // 100 + 1).all()
    assert (whole[200 * MiB : 200 * MiB + 10].cpu() == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_tensors_of_all_types(dtype):
    arena = Arena(GiB, GPU)
    arena.resize(4 * MiB)
    tensor = arena.tensor((16, 32, 64), dtype, offset=MiB)
    values = torch.arange(-50.0, 50.0, device=GPU).repeat(328)[: tensor.numel()].view(tensor.shape).to(dtype)
    tensor.copy_(values)
    assert torch.equal(tensor.float(), values.float())
    assert torch.equal(tensor[3].cpu().float(), values[3].cpu().float())
    bytewise = arena.tensor((4 * MiB,), torch.uint8)
    assert torch.equal(bytewise[MiB : MiB + values.nbytes], values.view(torch.uint8).flatten())


def test_the_drivers_account_is_ours(account):
    arena = Arena(64 * GiB, GPU)
    taken, mapped = account()
    assert abs(taken) <= SLACK
    assert mapped == 0
    for size, expected in (
        (GiB, GiB),
        (GiB + 1, GiB + arena.page),
        (100 * MiB, 2 * PIECE),
        (3 * PIECE - arena.page, 3 * PIECE - arena.page),
        (0, 0),
    ):
        arena.resize(size)
        taken, mapped = account()
        assert arena.mapped == mapped == expected
        assert abs(taken - mapped) <= SLACK


def test_a_tensor_keeps_the_memory_and_the_last_one_returns_it(account):
    arena = Arena(GiB, GPU)
    arena.resize(256 * MiB)
    view = arena.tensor((256 * MiB,), torch.uint8)[MiB : 2 * MiB]
    view.fill_(9)
    del arena
    taken, mapped = account()
    assert mapped == 256 * MiB
    assert abs(taken - mapped) <= SLACK
    assert (view == 9).all()
    del view
    taken, mapped = account()
    assert mapped == 0
    assert abs(taken) <= SLACK


def test_kernels_run_on_while_it_grows_and_end_before_it_shrinks():
    arena = Arena(8 * GiB, GPU)
    arena.resize(64 * MiB)
    x = arena.tensor((16 * MiB,), torch.float32)
    x.zero_()
    added = 0
    for step in range(1, 9):
        for _ in range(200):
            x.add_(1)
            added += 1
        arena.resize(64 * MiB + step * 100 * MiB)
    copy = torch.empty_like(x)
    copy.copy_(x)
    arena.resize(0)
    assert (copy == added).all()


def test_a_graph_replays_after_growing_and_after_all_memory_has_been_away():
    arena = Arena(8 * GiB, GPU)
    arena.resize(arena.page)
    count = 100_000
    low = arena.tensor((count,), torch.float32)
    high = arena.tensor((count,), torch.float32, offset=6 * GiB)  # nothing is there when the graph is captured
    low.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        low.add_(1)
        low.mul_(2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        low.add_(1)
        high.mul_(2)
    assert (low == 2).all()
    arena.resize(7 * GiB)
    assert (low == 2).all()
    high.fill_(5)
    graph.replay()
    assert (low == 3).all()
    assert (high == 10).all()
    for _ in range(3):
        kept = low.cpu(), high.cpu()
        arena.resize(0)
        other = torch.full((64 * MiB,), 77, dtype=torch.int32, device=GPU)  # perhaps where the arena's memory was
        arena.resize(7 * GiB)
        low.copy_(kept[0])
        high.copy_(kept[1])
        graph.replay()
        assert torch.equal(low.cpu(), kept[0] + 1)
        assert torch.equal(high.cpu(), kept[1] * 2)
        del other
    arena.close()


def imported(descriptor):
    """The handle of memory that a file descriptor stands for."""
    handle = ctypes.c_uint64()
    posix_file_descriptor = ctypes.c_int(1)
    status = driver.library().cuMemImportFromShareableHandle(
        ctypes.byref(handle), ctypes.c_void_p(descriptor), posix_file_descriptor
    )
    driver.check(status, "import")
    return handle.value


def test_what_is_exported_is_the_same_memory():
    arena = Arena(GiB, GPU)
    arena.resize(PIECE + 4 * MiB)
    ours = arena.tensor((PIECE + 4 * MiB,), torch.uint8)
    ours.fill_(3)
    memory = VirtualMemory(GPU)
    sizes = [PIECE, 4 * MiB]
    descriptors = arena.export()
    assert len(descriptors) == len(sizes)
    handles = [imported(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    start = memory.reserve(sum(sizes))
    place = start
    for size, handle in zip(sizes, handles, strict=True):
        memory.map(place, size, handle)
        place += size
    memory.allow(start, sum(sizes))
    theirs = bytes_at(start, sum(sizes), GPU, None)
    assert start != ours.data_ptr()
    assert (theirs == 3).all()
    theirs[PIECE - 100 : PIECE + 100] = 8
    assert (ours[PIECE - 100 : PIECE + 100] == 8).all()
    assert ours.count_nonzero() == ours.numel()
    arena.resize(0)
    assert (theirs[PIECE : PIECE + 100] == 8).all()  # it lives on for whoever imported it
    torch.cuda.synchronize()
    del theirs
    for size, handle in zip(reversed(sizes), reversed(handles), strict=True):
        place -= size
        memory.unmap(place, size)
        memory.release(handle)
    memory.free(start, sum(sizes))


def test_out_of_memory_changes_nothing(account):
    total = torch.cuda.mem_get_info(GPU)[1]
    arena = Arena(2 * total, GPU)
    arena.resize(PIECE)
    x = arena.tensor((PIECE,), torch.uint8)
    x.fill_(4)
    pieces = arena.export()
    for descriptor in pieces:
        os.close(descriptor)
    more = rounded_up(total, arena.page) - PIECE
    with pytest.raises(DeviceError, match=f"cuda:0: {more:,} bytes more were asked for, [0-9,]+ are free") as raised:
        arena.resize(total)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(raised.value)
    assert "\n" not in str(raised.value)
    taken, mapped = account()
    assert arena.mapped == mapped == PIECE
    assert abs(taken - mapped) <= SLACK
    assert (x == 4).all()
    arena.resize(3 * PIECE)
    assert arena.tensor((PIECE,), torch.uint8, 2 * PIECE).fill_(1).sum() == PIECE
    assert torch.ones(1000, device=GPU).sum() == 1000


def test_memory_that_torch_keeps_is_had():
    gc.collect()
    torch.cuda.empty_cache()
    size = rounded_up(int(torch.cuda.mem_get_info(GPU)[0] * 0.6), 2 * MiB)
    kept = torch.empty(size, dtype=torch.uint8, device=GPU)
    del kept
    assert torch.cuda.memory_reserved(GPU) >= size
    arena = Arena(size, GPU)
    arena.resize(size)
    assert arena.mapped == size
    assert torch.cuda.memory_reserved(GPU) < size
    arena.close()


def test_a_thousand_cycles_leak_nothing(account):
    arena = Arena(GiB, GPU)
    x = arena.tensor((8 * MiB,), torch.uint8)
    for _ in range(1000):
        arena.resize(8 * MiB)
        x.fill_(1)
        arena.resize(0)
    taken, mapped = account()
    assert mapped == 0
    assert abs(taken) <= SLACK


def test_hundreds_of_arenas_leak_nothing(account):
    for _ in range(300):
        arena = Arena(GiB, GPU)
        arena.resize(2 * MiB)
        arena.tensor((MiB,), torch.uint8).fill_(1)
        del arena
    taken, mapped = account()
    assert mapped == 0
    assert abs(taken) <= SLACK


def test_in_a_thread_that_has_not_used_cuda():
    arena = Arena(GiB, GPU)
    failed = []

    def run():
        try:
            arena.resize(100 * MiB)
            other = Arena(GiB, GPU)
            other.resize(2 * MiB)
            other.close()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    assert arena.tensor((100 * MiB,), torch.uint8).fill_(1).count_nonzero() == 100 * MiB


def test_an_arena_may_be_the_first_thing_that_a_process_does_and_the_last():
    program = """
import torch
from warpbus.cuda.vmm import Arena
arena = Arena(2**30, torch.device("cuda"))
arena.resize(1)
tensor = arena.tensor((4,), torch.int32)
assert tensor.fill_(3).sum().item() == 12
assert arena.device == torch.device("cuda", 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
