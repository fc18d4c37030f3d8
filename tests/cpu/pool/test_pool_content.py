"""Uploads that are kept: by hashes that the pool has computed itself, and nothing else."""

import hashlib
import os

import pytest
import torch

from warpbus.errors import StorageError
from warpbus.pool.protocol.instructions import MAX_WRITE, Writer
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.content import LEAST, ContentStore, Uploads
from warpbus.pool.tenant.execution import Executor

DATA = os.urandom(LEAST + 12345)
HASH = hashlib.sha256(DATA).digest()


def kept(store, data):
    assert not store.promise(hashlib.sha256(data).digest())  # a client asks before
    incoming = store.incoming()
    incoming.write(memoryview(data))
    return incoming.finish()


def files(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def store(tmp_path):
    return ContentStore(tmp_path / "content", 8 * LEAST)


def test_what_was_kept_is_found(store, tmp_path):
    assert not store.promise(HASH)
    assert store.take(HASH) is None
    assert kept(store, DATA) == HASH
    assert store.promise(HASH)
    assert bytes(store.take(HASH)) == DATA
    assert bytes(ContentStore(tmp_path / "content", 8 * LEAST).take(HASH)) == DATA
    assert (tmp_path / "content").stat().st_mode & 0o777 == 0o700
    assert files(tmp_path / "content") == [HASH.hex()]


def test_the_least_recently_used_goes(store, tmp_path):
    pieces = [bytes([n]) * LEAST for n in range(9)]
    hashes = []
    for at, piece in enumerate(pieces[:8]):
        hashes.append(kept(store, piece))
        os.utime(tmp_path / "content" / hashes[-1].hex(), (at, at))
    assert store.promise(hashes[0])  # now it was used, and is promised
    store.take(hashes[0])
    hashes.append(kept(store, pieces[8]))
    assert not store.promise(hashes[1])
    assert all(store.promise(each) for each in (hashes[0], *hashes[2:]))


def test_a_promise_holds_when_the_file_goes(store, tmp_path):
    kept(store, DATA)
    assert store.promise(HASH)
    (tmp_path / "content" / HASH.hex()).unlink()
    assert bytes(store.take(HASH)) == DATA
    assert not store.promise(HASH)


def test_directories_that_others_can_write_are_not_used(tmp_path):
    for mode in (0o755, 0o770, 0o707):
        directory = tmp_path / str(mode)
        directory.mkdir()
        directory.chmod(mode)
        with pytest.raises(StorageError, match="mode 700"):
            ContentStore(directory, 8 * LEAST)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError, match="mode 700"):
        ContentStore(tmp_path / "link", 8 * LEAST)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be kept"):
        ContentStore(tmp_path / "file", 8 * LEAST)


def test_links_are_not_followed(store, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    (tmp_path / "content" / HASH.hex()).symlink_to(secret)
    assert not store.promise(HASH)


def upload(uploads, data, handle=1, nbytes=None, step=MAX_WRITE):
    for start in range(0, len(data), step):
        uploads.wrote(handle, start, memoryview(data)[start : start + step], nbytes or len(data))
    uploads.settle()


def test_uploads_are_found_among_writes(store):
    uploads = Uploads(store)
    big = os.urandom(2 * LEAST)
    assert not any(store.promise(each) for each in (HASH, hashlib.sha256(big).digest()))
    for start in range(0, 2 * LEAST, LEAST // 2):  # two at a time
        uploads.wrote(1, start, memoryview(big)[start : start + LEAST // 2], len(big))
        if start < LEAST:
            uploads.wrote(2, start, memoryview(DATA)[start : start + LEAST // 2], len(DATA))
    uploads.wrote(2, LEAST, memoryview(DATA)[LEAST:], len(DATA))
    uploads.settle()
    assert store.promise(HASH)
    assert store.promise(hashlib.sha256(big).digest())


def test_uploads_that_are_not_complete_have_a_limit_too(store, tmp_path):
    uploads = Uploads(store)
    assert not store.promise(HASH)
    part = memoryview(bytes(3 * LEAST))
    for handle in range(1, 4):  # 9 MiB together, where 8 are kept
        uploads.wrote(handle, 0, part, 8 * LEAST)
    uploads.settle()
    sizes = [path.stat().st_size for path in (tmp_path / "content").iterdir()]
    assert sizes == [3 * LEAST, 3 * LEAST]


def test_what_nobody_asked_for_is_not_kept(store, tmp_path):
    uploads = Uploads(store)
    upload(uploads, DATA)  # not looked at
    assert not store.promise(os.urandom(32))
    upload(uploads, DATA)  # looked at, since something is expected, and it is something else
    assert files(tmp_path / "content") == []
    assert not store.promise(HASH)
    upload(uploads, DATA)
    assert store.promise(HASH)


@pytest.mark.parametrize("way", ["a part", "a gap", "again from the start", "too small", "too large"])
def test_other_writes_are_not(store, tmp_path, way):
    uploads = Uploads(store)
    assert not store.promise(HASH)
    if way == "a part":
        upload(uploads, DATA, nbytes=len(DATA) + 1)
    elif way == "a gap":
        uploads.wrote(1, 0, memoryview(DATA)[:100], len(DATA))
        uploads.wrote(1, 101, memoryview(DATA)[101:], len(DATA))
    elif way == "again from the start":
        uploads.wrote(1, 0, memoryview(DATA)[:100], len(DATA))
        uploads.wrote(1, 0, memoryview(DATA)[:50], len(DATA))
        uploads.wrote(1, 100, memoryview(DATA)[100:], len(DATA))
    elif way == "too small":
        upload(uploads, DATA[: LEAST - 1])
    else:
        upload(uploads, DATA, nbytes=store.limit + 1)
    uploads.settle()
    assert not any(name for name in files(tmp_path / "content") if not name.startswith("incoming-"))


def test_unfinished_uploads_are_few(store, tmp_path):
    uploads = Uploads(store)
    assert not store.promise(HASH)
    for handle in range(20):
        uploads.wrote(handle, 0, memoryview(DATA)[:100], len(DATA))
    uploads.settle()
    assert len(files(tmp_path / "content")) == 4


def test_a_full_disk_stops_no_upload(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    assert not store.promise(HASH)
    monkeypatch.setattr(os, "write", full)
    upload(Uploads(store), DATA)
    assert "No space left" in store.trouble
    monkeypatch.undo()
    upload(Uploads(store), DATA)
    assert (store.trouble, store.promise(HASH)) == ("", True)


def execute(executor, fill):
    writer = Writer()
    fill(writer)
    return executor.execute(executor.executed + 1, memoryview(bytes(writer.take())))


def test_a_lease_uses_what_another_one_of_its_tenant_has_uploaded(tmp_path):
    def lease():
        return Executor(torch.device("cpu"), Quota(1 << 24, 1.0), ContentStore(tmp_path / "somebody", 8 * LEAST))

    def first(writer):
        writer.new(1, len(DATA))
        writer.write(1, 0, DATA)

    def second(writer):
        writer.new(7, len(DATA) + 8)
        writer.known(7, 8, len(DATA), HASH)

    one, other = lease(), lease()
    assert list(one.answer(["known", [HASH, bytes(32)]])) == [[False, False]]
    assert execute(one, first) == []
    one.settle()
    assert list(other.answer(["known", [HASH, bytes(32)]])) == [[True, False]]
    assert execute(other, second) == []
    assert bytes(other.storages.read(7, 8, len(DATA))) == DATA


def test_a_client_cannot_say_what_a_hash_is_of(tmp_path):
    executor = Executor(torch.device("cpu"), Quota(1 << 24, 1.0), ContentStore(tmp_path / "somebody", 8 * LEAST))

    def lies(writer):
        writer.new(1, len(DATA))
        writer.known(1, 0, len(DATA), HASH)  # not there
        writer.new(2, len(DATA))
        writer.write(2, 0, DATA)
        writer.new(3, len(DATA))
        writer.known(3, 0, len(DATA) - 1, HASH)  # another size
        writer.known(2, 1, len(DATA), HASH)  # not inside

    assert list(executor.answer(["known", [HASH]])) == [[False]]
    failures = execute(executor, lies)
    assert [failure.operator for failure in failures] == ["KNOWN"] * 3
    executor.settle()
    assert list(executor.answer(["known", [hashlib.sha256(DATA[:-1]).digest(), HASH]])) == [[False, True]]
    assert executor.storages.used == 0  # what was to be filled was not, and can only be freed


def test_a_promise_is_awaited_for_a_moment(store, monkeypatch):
    kept(store, DATA)
    assert not store.awaited
    store.promise(HASH)
    assert store.awaited
    store.take(HASH)
    assert not store.awaited
    store.promise(HASH)
    monkeypatch.setattr("warpbus.pool.tenant.content._MOMENT", 0.0)
    assert not store.awaited


def test_no_promise_is_kept_for_ever(store, monkeypatch):
    monkeypatch.setattr("warpbus.pool.tenant.content._MAX_PROMISES", 2)
    hashes = [kept(store, bytes([n]) * LEAST) for n in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    assert all(store.promise(each) for each in hashes)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
