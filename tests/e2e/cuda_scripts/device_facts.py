"""Asserts what an ordinary program finds of CUDA on a leased GPU of 300 MB; arguments are ignored."""

import io
import pickle
import threading
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

QUOTA = 300_000_000


def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert all(word in said for word in words), said


def the_device_is_there():
    cuda = torch.device("cuda", 0)
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    properties = torch.cuda.get_device_properties("cuda")
    assert properties.total_memory == QUOTA
    assert properties.name == torch.cuda.get_device_name() != ""
    assert torch.cuda.get_device_capability(cuda) == (0, 0)
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(0)
    raises(AttributeError, lambda: properties.multi_processor_count, "multi_processor_count")


def tensors_come_onto_it_by_all_spellings():
    cuda = torch.device("cuda", 0)
    x = torch.arange(4.0)
    there = [x.to("cuda"), x.to(cuda), x.to(0), x.cuda(), x.cuda(0), x.to(device="cuda:0"), x.to(torch.ones(1).cuda())]
    there += [torch.tensor([0.0, 1.0, 2.0, 3.0], device="cuda"), torch.as_tensor(x, device=cuda)]
    there += [torch.arange(4.0, device=torch.device("cuda")), torch.zeros_like(x, device="cuda") + x.cuda()]
    there += [x.new_tensor([0.0, 1.0, 2.0, 3.0], device="cuda"), x.type("torch.cuda.FloatTensor")]
    there += [torch.cuda.FloatTensor([0.0, 1.0, 2.0, 3.0]), x.cuda().new_zeros(4) + x.cuda()]
    for each in there:
        assert each.device == cuda
        assert each.is_cuda
        assert each.get_device() == 0
        assert each.cpu().equal(x)
        assert each.type() == "torch.cuda.FloatTensor"
        assert isinstance(each, torch.cuda.FloatTensor)
    assert not x.is_cuda
    assert x.device == torch.device("cpu")
    assert "device='cuda:0'" in repr(there[0])
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    torch.set_default_device("cuda")
    assert torch.ones(2).is_cuda
    assert torch.get_default_device() == cuda
    torch.set_default_device(None)
    assert not torch.ones(2).is_cuda
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda").sum().item()))
    thread.start()
    thread.join()
    assert found == [2.0]
    raises(RuntimeError, lambda: x.cuda() + x, "same device")
    raises(ValueError, lambda: x.to("cuda:1"), "cuda:1", "one GPU")


def memory_is_that_of_the_lease():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = torch.zeros(1_000_000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4_000_000
    assert torch.cuda.mem_get_info() == (QUOTA - torch.cuda.memory_allocated(), QUOTA)
    del kept
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4_000_000
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before == torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    raises(torch.OutOfMemoryError, lambda: torch.empty(QUOTA, device="cuda"), "out of memory")


def streams_and_events_are_in_order():
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        x = torch.ones(64, 64, device="cuda")
        y = x @ x
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    y.record_stream(stream)
    torch.cuda.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) > 0
    assert y[0, 0].item() == 64.0


def random_numbers_are_seeded():
    torch.cuda.manual_seed_all(5)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").equal(second)
    torch.manual_seed(5)
    assert torch.rand(3, device="cuda").equal(first)
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert torch.rand(3, device="cuda", generator=generator).equal(first)
    assert generator.device.type == "cuda"
    with torch.random.fork_rng():
        torch.rand(3, device="cuda")
    assert torch.rand(3, device="cuda").equal(second)


def mixed_precision_trains():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(device_type="cuda", dtype=dtype):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is dtype
            output = model(torch.ones(2, 8, device="cuda"))
            assert output.dtype is dtype
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.is_enabled()
    assert not model.weight.equal(before)
    assert not torch.is_autocast_enabled("cuda")


def checkpoints_are_ordinary_files():
    model = nn.Linear(3, 2).to("cuda")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where, kind in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda"), ({"cuda:0": "cpu"}, "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=where)["weight"]
        assert found.device.type == kind
        assert found.cpu().equal(model.weight.cpu())
    assert b"warpbus" not in file.getvalue()
    assert b"cuda:0" in file.getvalue()
    assert pickle.loads(pickle.dumps(model)).weight.is_cuda


def loaders_and_wrappers_work():
    loader = DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True, num_workers=1)
    assert [batch.to("cuda", non_blocking=True).sum().item() for batch in loader] == [6.0, 22.0]
    layer = nn.Linear(3, 2).cuda()
    parallel = nn.DataParallel(layer)
    assert parallel(torch.ones(4, 3)).equal(layer(torch.ones(4, 3).cuda()))
    x = torch.ones(16, device="cuda", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(nn.Dropout(0.5), x, use_reentrant=False)
    y.sum().backward()
    assert y.equal(x.grad)


def compiler_and_profiler_stand_aside():
    layer, x = nn.Linear(3, 2).cuda(), torch.ones(4, 3, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = torch.compile(layer)(x)
        with torch.profiler.profile(activities=activities) as profile:
            layer(x)
    found.sum().backward()
    assert found.equal(layer(x))
    assert any("aten::addmm" in event.key for event in profile.key_averages())
    said = " ".join(str(each.message) for each in warned)
    assert "nothing is compiled" in said, said
    assert "the profiler does not see a leased GPU" in said, said
    assert len({parameter.data_ptr() for parameter in layer.parameters()}) == 2


def what_cannot_be_had_says_so():
    assert not isinstance(torch.ones(1), torch.cuda.CUDAGraph)
    raises(NotImplementedError, torch.cuda.CUDAGraph, "torch.cuda.CUDAGraph", "docs/pool.md")
    raises(NotImplementedError, torch.cuda.utilization, "torch.cuda.utilization")
    raises(NotImplementedError, torch.cuda.memory_snapshot, "memory_snapshot")


if __name__ == "__main__":
    torch.cuda.manual_seed(1)  # before there is a lease
    the_device_is_there()
    tensors_come_onto_it_by_all_spellings()
    memory_is_that_of_the_lease()
    streams_and_events_are_in_order()
    random_numbers_are_seeded()
    mixed_precision_trains()
    checkpoints_are_ordinary_files()
    loaders_and_wrappers_work()
    compiler_and_profiler_stand_aside()
    what_cannot_be_had_says_so()
    print("all as expected")
