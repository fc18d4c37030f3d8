"""Evicted blocks on a disk: found again with the same bits, also by the next engine, and never a wrong one."""

import asyncio
import errno
import random
import threading
from dataclasses import replace

import pytest
import torch
from engine_models import FAMILIES, SMALL, finish, random_lora

from warpbus.engine import disk_cache, host_cache
from warpbus.engine.adapters import BlockSalts
from warpbus.engine.blocks import BLOCK
from warpbus.engine.disk_cache import DiskCache, DiskSpace
from warpbus.engine.engine import Engine, request
from warpbus.engine.fingerprint import kv_fingerprint
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.service import Service
from warpbus.errors import NumericError, StorageError, UsageError
from warpbus.models import random_model
from warpbus.qtensor import Scheme

SCORED = SamplingParams(temperature=0, logprobs=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


@pytest.fixture
def space(tmp_path):
    return DiskSpace(tmp_path / "kv", 1 << 30, "fingerprint")


@pytest.fixture
def may_read(monkeypatch):
    """An event that all reads of files wait for."""
    event, read_file = threading.Event(), DiskCache._read_file

    def wait_and_read(self, *arguments):
        assert event.wait(60)
        return read_file(self, *arguments)

    monkeypatch.setattr(DiskCache, "_read_file", wait_and_read)
    return event


def store(engine, asked):
    """Leave the blocks of a prompt on the disk."""
    ask(engine, asked)
    engine.save()
    engine.close()


@pytest.fixture
def engine_of(model):
    """Makes engines with a cache of eight blocks, and ends their threads."""
    made = []

    def make(space, model=model, *, blocks=8, **options):
        made.append(Engine(model, max_model_len=8 * BLOCK, cache_tokens=blocks * BLOCK, disk=space, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt(seed, length):
    return random.Random(seed).choices(range(SMALL.vocab_size), k=length)


def ask(engine, ids, tokens=6):
    """The answer, after which everything is written."""
    asked = request(ids, tokens=tokens, params=SCORED)
    finish(engine, [asked])
    engine._memory.host.disk.wait(60, all_of_them=True)
    engine._memory.host.poll()
    return asked


def said(sequence):
    return sequence.token_ids, [(one.logprob, one.top) for one in sequence.logprobs]


def files(space):
    return sorted(path for path in space.directory.rglob("*") if path.is_file() and path.suffix != ".lock")


def warm(model, ids):
    """The answer to a prompt whose blocks have stayed in the cache: with its bits others are compared."""
    engine = Engine(model)
    found = [request(ids, tokens=6, params=SCORED) for _ in range(2)]
    for each in found:
        finish(engine, [each])
    return said(found[1])


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("glm", "auto"), ("latent", "auto"), ("latent", "fp8"), ("sparse", "auto"), ("sparse", "fp8"), ("qwen3", "auto")],
)
def test_answers_have_the_same_bits(family, kv_dtype, space, engine_of):
    """Main memory is emptied before each prompt, so that what is not in the cache comes from the disk."""
    model = random_model(FAMILIES[family], None, "cpu", torch.float32)
    first, second = prompt(1, 5 * BLOCK + 3), prompt(2, 4 * BLOCK)
    prompts = [first, second, [*first, 7, 8], prompt(3, 6 * BLOCK), [*second, 9], first[: 3 * BLOCK + 5], first]
    large, small = Engine(model, kv_dtype=kv_dtype), engine_of(space, model, kv_dtype=kv_dtype)
    for each in prompts:
        small._memory.host.blocks.clear()
        expected = request(each, tokens=6, params=SCORED)
        finish(large, [expected])
        found = ask(small, each)
        assert (said(found), found.cached_tokens) == (said(expected), expected.cached_tokens)
    stats, block = small.stats(), large._instance.cache.block_bytes
    assert stats.disk_hits > 0
    assert stats.host_hits == 0
    assert stats.prefix_hits == large.stats().prefix_hits
    assert stats.disk_loaded_bytes >= stats.disk_hits // BLOCK * block
    assert stats.disk_bytes == sum(path.stat().st_size for path in files(space))
    assert stats.disk_stored_bytes == len(files(space)) * block


def test_the_next_engine_finds_the_blocks(model, space, engine_of):
    """Also those that were still in the cache when the first one ended."""
    asked, other = prompt(1, 6 * BLOCK + 1), prompt(2, 5 * BLOCK)
    first = engine_of(space)
    for each in (asked, other):
        ask(first, each)
    first.save()
    first.close()
    second = engine_of(space)
    found = [ask(second, each) for each in (asked, other)]
    assert [said(each) for each in found] == [warm(model, each) for each in (asked, other)]
    assert [each.cached_tokens for each in found] == [6 * BLOCK, 4 * BLOCK]
    assert second.stats().disk_hits == 10 * BLOCK
    assert second.stats().disk_stored_bytes == 0  # nothing is written twice
    third = engine_of(replace(space, fingerprint="another"))
    assert ask(third, asked).cached_tokens == 0


@pytest.mark.parametrize("damage", ["a byte", "truncated", "longer", "header", "another block", "gone"])
def test_a_damaged_file_is_not_used(damage, model, space, engine_of):
    asked = prompt(1, 6 * BLOCK + 1)
    first = engine_of(space)
    ask(first, asked)
    keys = first._scheduler._blocks.keyed().values()
    first.save()
    first.close()
    third = next(path for path in files(space) if path.name == list(keys)[2].hex())
    content = third.read_bytes()
    other = next(path for path in files(space) if path != third).read_bytes()
    changed = {
        "a byte": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "truncated": content[:-1],
        "longer": content + b"0",
        "header": b"x" + content[1:],
        "another block": other,
    }
    second = engine_of(space)  # before the damage: it knows the file by its name and size
    if damage == "gone":
        third.unlink()
    else:
        third.write_bytes(changed[damage])
    found = ask(second, asked)
    assert found.token_ids == warm(model, asked)[0]
    assert found.cached_tokens == 2 * BLOCK
    # Computed again, it is written again.
    second.save()
    second.close()
    assert third.read_bytes() == content
    assert ask(engine_of(space), asked).cached_tokens == 6 * BLOCK


def test_files_of_other_sizes_and_names_are_deleted_at_the_start(space, engine_of):
    first = engine_of(space)
    ask(first, prompt(1, 6 * BLOCK + 1))
    first.save()
    first.close()
    kept = files(space)
    kept[0].write_bytes(b"short")
    (kept[1].parent / "0123.partial").write_bytes(b"half")
    engine_of(space)
    assert files(space) == kept[1:]


def test_the_limit_is_kept_and_the_last_used_stay(space, engine_of):
    each = Engine(random_model(SMALL, None, "cpu", torch.float32))._instance.cache.block_bytes + 64
    limited = replace(space, nbytes=9 * each)
    prompts = [prompt(seed, 5 * BLOCK + 1) for seed in range(3)]
    first = engine_of(limited)
    for one in prompts:
        ask(first, one, tokens=2)
        assert first.stats().disk_bytes <= limited.nbytes
    first.save()
    first.close()
    assert sum(path.stat().st_size for path in files(space)) == 9 * each
    second = engine_of(limited)
    assert ask(second, prompts[2], tokens=2).cached_tokens == 5 * BLOCK
    assert ask(second, prompts[0], tokens=2).cached_tokens == 0
    second.close()
    third = engine_of(replace(space, nbytes=3 * each))  # less than there is
    third.close()
    assert len(files(space)) == 3
    with pytest.raises(UsageError, match="kv_disk_size is 100 bytes, a block of the cache needs"):
        engine_of(replace(space, nbytes=100))


def test_a_full_disk_is_a_warning(model, space, engine_of, monkeypatch, caplog):
    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = engine_of(space)
    prompts = [prompt(seed, 6 * BLOCK + 1) for seed in range(3)]
    for each in prompts:
        ask(engine, each)
    written = len(files(space))
    assert written
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "_write_all", full)
        for seed in range(10, 14):
            ask(engine, prompt(seed, 6 * BLOCK + 1))
    warnings = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(warnings) == 1
    assert "no more blocks are written" in warnings[0]
    assert len(files(space)) == written
    engine._memory.host.blocks.clear()
    assert said(ask(engine, prompts[0])) == warm(model, prompts[0])
    assert engine.stats().disk_hits == 6 * BLOCK


def test_other_requests_go_on_while_files_are_read(model, space, engine_of, may_read):
    long = prompt(1, 5 * BLOCK + 1)
    store(engine_of(space), long)
    engine = engine_of(space, max_num_seqs=3)
    waiting, running = request(long, tokens=6, params=SCORED), request(prompt(2, 9), tokens=20)
    engine.add(waiting)
    assert engine.step() == []  # alone it waits for a moment, and is not refused
    engine.add(running)
    while not running.ended:
        engine.step()
    assert not waiting.token_ids
    may_read.set()
    finish(engine)
    assert said(waiting) == warm(model, long)
    assert waiting.cached_tokens == 5 * BLOCK


def test_a_request_may_go_while_its_files_are_read(model, space, engine_of, may_read):
    long = prompt(1, 5 * BLOCK + 1)
    store(engine_of(space), long)
    engine = engine_of(space)
    left = request(long, tokens=6)
    engine.add(left)
    engine.step()
    engine.abort(left)
    assert not engine.has_work
    may_read.set()
    assert said(ask(engine, long)) == warm(model, long)


def test_many_requests_at_once_with_preemptions(model, space, engine_of):
    draw = random.Random(4)
    heads = [prompt(seed, 3 * BLOCK) for seed in range(3)]
    prompts = [[*draw.choice(heads), *prompt(50 + at, draw.randint(1, 40))] for at in range(16)]
    expected = [Engine(model).decode([each], 40)[0] for each in prompts]
    block = Engine(model)._instance.cache.block_bytes
    for _ in range(2):
        engine = engine_of(space, max_num_seqs=6, blocks=10, max_num_batched_tokens=64, host_bytes=6 * block)
        requests = [request(each, tokens=40, params=SamplingParams(temperature=0)) for each in prompts]
        finish(engine, requests)
        assert [each.token_ids for each in requests] == expected
        assert engine.stats().preemptions > 0
        engine.save()
        engine.close()
    assert engine.stats().disk_hits > 0


def test_engines_of_one_directory_have_their_own_files(space, engine_of, tmp_path):
    asked = prompt(1, 6 * BLOCK + 1)
    engines = [engine_of(space), engine_of(space)]
    for each in engines:
        assert ask(each, asked).cached_tokens == 0
        each.save()
    assert [each._memory.host.disk.directory.name for each in engines] == ["0", "1"]
    for each in engines:
        each.close()
    assert ask(engine_of(space), asked).cached_tokens == 6 * BLOCK
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="give a directory that can be written"):
        engine_of(replace(space, directory=tmp_path / "file"))


def test_a_request_that_fails_leaves_nothing_on_the_disk(space, engine_of):
    engine = engine_of(space)
    asked = prompt(1, 5 * BLOCK + 1)
    ask(engine, asked)
    ask(engine, prompt(2, 7 * BLOCK))  # evicts it
    assert files(space)
    bad = request(asked, tokens=2)
    engine.add(bad)
    while not bad.token_ids:
        engine.step()
    bad.fail(NumericError("NaN: give another adapter"))
    engine.abort(bad)
    keys = bad.scheduler_state.keys[:5]
    assert not any(key in engine._memory.host.disk for key in keys)
    engine._memory.host.disk.wait(60, all_of_them=True)
    assert not {key.hex() for key in keys} & {path.name for path in files(space)}
    assert ask(engine, asked).cached_tokens == 0


def test_a_block_that_is_dropped_while_it_is_read_is_not_used(model, space, engine_of, may_read):
    long = prompt(1, 5 * BLOCK + 1)
    store(engine_of(space), long)
    engine = engine_of(space)
    waiting, later = request(long, tokens=6), request(long, tokens=6)
    engine.add(waiting)
    engine.step()
    engine._memory.host.blocks.drop(waiting.scheduler_state.keys[2])
    engine.add(later)
    engine.step()
    may_read.set()
    engine._memory.host.disk.wait(60, all_of_them=True)  # else the later one may be computed before it, for both
    finish(engine)
    assert waiting.cached_tokens == 2 * BLOCK
    assert waiting.token_ids == later.token_ids == warm(model, long)[0]


def test_sleep_and_adapters(model, space, engine_of):
    engine = engine_of(space)
    asked = prompt(1, 5 * BLOCK + 1)
    ask(engine, asked)
    engine.shrink()
    assert engine.use_adapters([random_lora(model, "other", 4)]) == []  # empties main memory, not the disk
    assert engine.stats().host_bytes == 0
    again = ask(engine, asked)
    assert (said(again), again.cached_tokens) == (warm(model, asked), 5 * BLOCK)
    engine.use_adapters([])


def test_adapters_of_one_name_and_other_tensors_share_no_blocks(model):
    one, other = random_lora(model, "name", 4), random_lora(model, "name", 4, scale=0.5)
    found = [BlockSalts(outliving=True).of(each, salt) for each in (None, one, other) for salt in (b"", b"key")]
    assert len(set(found)) == 6
    assert BlockSalts(outliving=True).of(one, b"") == found[2]
    salts = BlockSalts(outliving=True)
    assert [salts.of(each, b"") for each in (one, other, one)] == [found[2], found[4], found[2]]


def test_the_fingerprint_covers_an_embedding_that_the_plan_rounds(tiny_glm):
    """Keys and values depend on it; those of a smaller limit are not used with a larger one."""
    opened, options = open_model(tiny_glm, CPU, ServiceOptions()), ServiceOptions()
    plan = MemoryPlan("GPU", {}, 10**9, 96, 320, "auto", None, False, 16)
    rounded = replace(plan, embedding=Scheme.parse("w8a16-g32"))
    names = [kv_fingerprint(replace(opened, plan=each), options) for each in (plan, rounded, plan)]
    assert names[0] == names[2] != names[1]


def test_what_the_fingerprint_covers(tiny_glm, tmp_path):
    options = ServiceOptions(device="cpu")

    def of(directory=tiny_glm, **given):
        changed = replace(options, **given)
        return kv_fingerprint(open_model(directory, CPU, changed), changed)

    kept = {of(), of(kv_dtype="int8"), of(kv_dtype="fp8"), of(kv_dtype="int4")}
    found = {*kept, of(dtype="bfloat16"), of(dtype="float32", activation_dtype="int8")}
    assert len(found) == 6
    assert of() == of(max_num_seqs=3, cache_tokens=640)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_glm.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert of(copy) == of()
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert of(copy) not in found


def test_options():
    assert ServiceOptions(kv_disk="kv", kv_disk_size="1GB").kv_disk_size == "1GB"
    with pytest.raises(UsageError, match="kv_disk_size is 'much'"):
        ServiceOptions(kv_disk="kv", kv_disk_size="much")
    with pytest.raises(UsageError, match="prefix caching, which is off"):
        ServiceOptions(kv_disk="kv", prefix_caching=False)
    with pytest.raises(UsageError, match="kv_disk_size limits the files of kv_disk, which is not given"):
        ServiceOptions(kv_disk_size="1GB")
    with pytest.raises(UsageError, match="kv_disk with tensor_parallel 2"):
        ServiceOptions(kv_disk="kv", tensor_parallel=2)


def test_main_memory_that_a_disk_needs():
    staged = host_cache.staging_bytes
    assert staged(1 << 20, 10) == 1 << 28
    assert staged(1 << 20, 1024) == 1 << 31
    assert staged(1 << 20, 100_000) == 1 << 32


def test_a_service_that_is_started_again(tiny_glm, tmp_path):
    asked = random.Random(1).choices(range(10, 400), k=3 * BLOCK + 1)

    async def run():
        options = ServiceOptions(device="cpu", max_model_len=5 * BLOCK, kv_disk=str(tmp_path), kv_disk_size="10MB")
        service = await Service.start(tiny_glm, options)
        pieces = [piece async for piece in service.generate(asked, SamplingParams(max_tokens=8, temperature=0))]
        stats = await service.stats()
        await service.close()
        return [token for piece in pieces for token in piece.token_ids], pieces[-1].cached_tokens, stats.disk_hits

    first, second = asyncio.run(run()), asyncio.run(run())
    assert first[1:] == (0, 0)
    assert second == (first[0], 3 * BLOCK, 3 * BLOCK)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_limits_less_than_a_block_are_refused_before_the_weights_are_read(tmp_path, tiny_glm, kv_dtype):
    base = ServiceOptions(device="cpu", max_model_len=5 * BLOCK, kv_dtype=kv_dtype, kv_host_memory=2**20)
    engine = build_engine(open_model(tiny_glm, CPU, base), base)
    block = engine._instance.cache.block_bytes
    engine.close()
    read = []
    for needed, options in (
        (block + 64, replace(base, kv_disk=str(tmp_path), kv_disk_size=block + 63)),
        (block, replace(base, kv_host_memory=block - 1)),
    ):
        with pytest.raises(UsageError, match=rf" is {needed - 1:,} bytes, a block of the cache .* {needed:,}: give m"):
            build_engine(open_model(tiny_glm, CPU, options), options, progress=lambda *at: read.append(at))
    assert read == []


def test_a_directory_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path, tiny_glm):
    (tmp_path / "file").touch()
    options = ServiceOptions(device="cpu", kv_disk=str(tmp_path / "file" / "kv"))
    with pytest.raises(
        StorageError, match=r"^kv_disk: .*file/kv cannot be written \(.+\): give a directory that can be$"
    ):
        open_model(tiny_glm, CPU, options)
    opened = open_model(tiny_glm, CPU, replace(options, kv_disk=str(tmp_path / "new" / "kv")))
    assert opened.config.vocab_size > 0
    assert list((tmp_path / "new" / "kv").iterdir()) == []
