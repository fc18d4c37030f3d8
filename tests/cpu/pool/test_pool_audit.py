"""The audit log: one object a line, for its owner alone, begun anew when it is large."""

import json

import pytest

from warpbus.errors import StorageError
from warpbus.pool.daemon.audit import AuditLog


def test_a_line_has_what_happened(tmp_path):
    path = tmp_path / "deep" / "audit.jsonl"
    log = AuditLog(path)
    log.note("lease", tenant="ann", address="127.0.0.1 port 5", lease="ab", memory=3, gpu=None)
    log.note("ended")
    log.close()
    log.note("ended")  # nobody listens any more
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first.pop("time") > 1.7e9
    assert first == {"what": "lease", "tenant": "ann", "address": "127.0.0.1 port 5", "lease": "ab", "memory": 3}
    assert second["what"] == "ended"
    assert path.stat().st_mode & 0o777 == 0o600


def test_names_cannot_break_lines(tmp_path):
    log = AuditLog(tmp_path / "log")
    log.note("refused", tenant='a"\n\x00ü')
    log.close()
    [line] = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["tenant"] == 'a"\n\x00ü'


@pytest.mark.parametrize("secret", ["token", "key", "migration_token"])
def test_secrets_are_not_accepted(tmp_path, secret):
    with pytest.raises(AssertionError):
        AuditLog(tmp_path / "log").note("lease", **{secret: "x"})


def test_it_is_begun_anew_and_the_last_are_kept(tmp_path):
    path = tmp_path / "log"
    log = AuditLog(path, size=400, kept=2)
    for number in range(40):
        log.note("lease", lease=str(number))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 400 for file in files)
    kept = [json.loads(line)["lease"] for file in reversed(files) for line in file.read_text().splitlines()]
    assert kept == [str(number) for number in range(40 - len(kept), 40)]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="give another --audit-log"):
        AuditLog(tmp_path / "file" / "log")
