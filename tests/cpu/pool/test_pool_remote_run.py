"""`pool run --remote`: the address that a host means, what is asked for by default, and options that Python may not
have."""

import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from warpbus.errors import UnavailableError, UsageError
from warpbus.pool.processes import remote
from warpbus.pool.processes.remote import pool_address, run
from warpbus.pool.quota import Quota


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("mill", "warpbuss://mill:7700"),
        ("mill:7801", "warpbuss://mill:7801"),
        ("10.0.0.5", "warpbuss://10.0.0.5:7700"),
        ("localhost", "warpbus://localhost:7700"),
        ("127.0.0.1:9", "warpbus://127.0.0.1:9"),
        ("[::1]:9", "warpbus://[::1]:9"),
        ("warpbuss://mill:7700?ca=cert.pem", "warpbuss://mill:7700?ca=cert.pem"),
        ("warpbus+unix:///run/pool", "warpbus+unix:///run/pool"),
    ],
)
def test_a_host_means_an_address(host: str, expected: str) -> None:
    assert str(pool_address(host)) == expected


def test_what_is_no_host() -> None:
    with pytest.raises(UsageError, match="no host and port"):
        pool_address("a b")


class FakeControl:
    """A control connection to a pool with these GPUs."""

    gpus: ClassVar[list[dict]] = []
    released: ClassVar[list[str]] = []
    left: ClassVar[dict] = {}

    def __init__(self, to, token):
        self.token = token

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, operation, arguments=None):
        if operation == "release":
            self.released.append(arguments["lease"])
            return {}
        assert operation == "status"
        return {"gpus": self.gpus} | ({"left": self.left} if self.left else {})


def gpu(name: str, free: int, used: float = 0.0, state: str = "open") -> dict:
    sizes = {"free": free, "memory": 1000, "share_used": used, "oversubscribe": 1.0}
    return {"name": name, "host": name[:-2], "state": state, **sizes}


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(remote, "ControlChannel", FakeControl)
    monkeypatch.setattr(FakeControl, "released", [])
    monkeypatch.setattr(FakeControl, "gpus", [gpu("a/0", 500), gpu("b/0", 800, 0.25), gpu("b/1", 900, 0, "draining")])
    return FakeControl


def started(tmp_path: Path, **options) -> dict:
    """The variables that a program gets."""
    given = {"memory": None, "share": None, "on": None, "token": None, "tenant": "alice"} | options
    said = tmp_path / "said"
    code = f"import json, os; open({str(said)!r}, 'w').write(json.dumps(dict(os.environ)))"
    assert run([sys.executable, "-c", code], pool_address("localhost"), tmp_path, **given) == 0
    return json.loads(said.read_text())


def test_by_default_all_that_is_free_of_the_emptiest_gpu(pool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = started(tmp_path)
    assert (found["WARPBUS_POOL_MEMORY"], found["WARPBUS_POOL_SHARE"]) == ("800", "0.75")
    assert found["WARPBUS_POOL"] == "warpbus://localhost:7700"
    assert found["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    assert found["WARPBUS_TENANT"] == "alice"
    assert not Path(found["WARPBUS_POOL_LEASES"]).parent.exists()


def test_of_an_oversubscribed_gpu_no_more_than_it_has(pool, tmp_path: Path) -> None:
    pool.gpus = [{**gpu("a/0", 1500, 0.5), "oversubscribe": 2.0}]
    found = started(tmp_path)
    assert (found["WARPBUS_POOL_MEMORY"], found["WARPBUS_POOL_SHARE"]) == ("1000", "1.0")
    pool.gpus = [{**gpu("a/0", 300, 1.75), "oversubscribe": 2.0}]
    found = started(tmp_path)
    assert (found["WARPBUS_POOL_MEMORY"], found["WARPBUS_POOL_SHARE"]) == ("300", "0.25")


def test_what_is_given(pool, tmp_path: Path) -> None:
    found = started(tmp_path, memory="50%", share=0.5, on="a", token="secret")
    assert (found["WARPBUS_POOL_MEMORY"], found["WARPBUS_POOL_SHARE"]) == ("500", "0.5")
    assert (found["WARPBUS_POOL_ON"], found["WARPBUS_POOL_TOKEN"]) == ("a", "secret")


@pytest.mark.parametrize(
    ("left", "options", "expected"),
    [
        ({"memory": 300, "share": 0.5}, {}, (300, 0.5)),
        ({"memory": 10**9, "share": 3.0}, {}, (800, 0.75)),
        ({"memory": None, "share": None}, {}, (800, 0.75)),
        ({"memory": 300, "share": 0.5}, {"memory": "50%"}, (500, 0.5)),  # refused by the pool, with its reason
        ({"memory": 300, "share": None}, {"memory": "30%"}, (300, 1.0)),
        ({"memory": 300, "share": 0.5}, {"share": 0.25}, (300, 0.25)),
    ],
)
def test_limits_lower_what_is_not_given(pool, tmp_path: Path, monkeypatch, left, options, expected) -> None:
    monkeypatch.setattr(FakeControl, "left", left)
    said: list[Quota] = []
    found = started(tmp_path, chosen=said.append, **options)
    assert (int(found["WARPBUS_POOL_MEMORY"]), float(found["WARPBUS_POOL_SHARE"])) == expected
    assert said == [Quota(*expected)]


@pytest.mark.parametrize(
    ("left", "options", "what"),
    [
        ({"memory": 0, "share": 1.0}, {}, "memory"),
        ({"memory": 5, "share": 0.0}, {}, "share"),
        ({"memory": 5, "share": 0.0}, {"memory": "1%"}, "share"),
    ],
)
def test_limits_that_leave_nothing(pool, tmp_path: Path, monkeypatch, left, options, what) -> None:
    monkeypatch.setattr(FakeControl, "left", left)
    with pytest.raises(UnavailableError, match=f"the limits of your token leave no {what}: release a lease"):
        started(tmp_path, **options)


@pytest.mark.parametrize(
    ("gpus", "options", "error"),
    [
        ([], {}, "no open GPU"),
        ([gpu("a/0", 10)], {"on": "b"}, "no open GPU or host b"),
        ([gpu("a/0", 0)], {}, "no GPU of the pool is free"),
        ([gpu("a/0", 10, 1.0)], {}, "no GPU of the pool is free"),
    ],
)
def test_a_full_pool(pool, tmp_path: Path, monkeypatch, gpus, options, error) -> None:
    monkeypatch.setattr(FakeControl, "gpus", gpus)
    with pytest.raises(UnavailableError, match=error):
        started(tmp_path, **options)


def test_what_a_program_leaves_behind_is_released(pool, tmp_path: Path) -> None:
    code = "import os; open(os.environ['WARPBUS_POOL_LEASES'], 'w').write('one\\ntwo\\n')"
    options = {"memory": "1MB", "share": 1.0, "on": None, "token": None, "tenant": "alice"}
    pool.gpus = [gpu("a/0", 1)]
    pool.gpus[0]["memory"] = 10**9
    assert run([sys.executable, "-c", code], pool_address("localhost"), tmp_path, **options) == 0
    assert pool.released == ["one", "two"]


@pytest.mark.parametrize("options", [["-I"], ["-u", "-E"], ["-uS"], ["-Ic", "pass"]])
def test_python_has_to_read_its_variables(pool, tmp_path: Path, options) -> None:
    with pytest.raises(UsageError, match="PYTHONPATH"):
        run(
            ["/usr/bin/python3.11", *options],
            pool_address("localhost"),
            tmp_path,
            memory=None,
            share=None,
            on=None,
            token=None,
            tenant="alice",
        )


def test_no_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no program"):
        run([], pool_address("mill"), tmp_path, memory=None, share=None, on=None, token=None, tenant="alice")
