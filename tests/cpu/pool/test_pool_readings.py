"""Questions that are asked ahead, of a tenant's process: answers in any order, lost connections, errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_tenants import KEY, started

from warpbus.engine.engine import request
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.errors import PoolError
from warpbus.pool.client import connection as connections
from warpbus.pool.client.connection import Connection
from warpbus.pool.client.device import register
from warpbus.pool.client.session import Session, leave, use
from warpbus.pool.client.transfers import fetch
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.failures import CallFailure
from warpbus.pool.protocol.frames import Frame, Kind
from warpbus.pool.protocol.wire import encode

REMOTE = "warpbus"
MEMORY = 1 << 27


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    register()
    with started(memory=MEMORY) as daemon, pytest.MonkeyPatch.context() as patch:
        assert daemon.hear("ready", "failed").operation == "ready"
        patch.setattr(connections, "connect", lambda where, lease, key: Channel(daemon.socket(), "the tenant"))
        connection = Connection(address("warpbus://localhost:1"), bytes(16), KEY)
        session = Session(connection, MEMORY, "cpu", (9, 0))
        use(session)
        try:
            yield session
        finally:
            leave(session)
            connection.close()


def test_answers_come_in_any_order(session: Session) -> None:
    x = torch.arange(6.0, device=REMOTE)
    asked = [fetch(x * count) for count in range(5)]
    assert (x + 1).sum().item() == 21.0
    del asked[3]  # nobody wants it any more
    assert torch.equal(asked[2](), torch.arange(6.0) * 2)
    assert fetch(x.view(2, 3).t())().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert fetch(x[:0])().numel() == 0
    assert [reading().tolist() for reading in asked] == [(torch.arange(6.0) * n).tolist() for n in (0, 1, 2, 4)]


def test_what_was_asked_is_asked_again_on_another_connection(session: Session) -> None:
    connection: Any = session.connection
    before = connection.reconnections
    x = torch.arange(4.0, device=REMOTE)
    first = fetch(x + 1)
    connection._channel.close()
    second = fetch(x + 2)
    assert second().tolist() == [2, 3, 4, 5]
    assert first().tolist() == [1, 2, 3, 4]
    third = fetch(x + 3)
    connection._channel.close()
    assert third().tolist() == [3, 4, 5, 6]
    assert connection.reconnections - before == 2


def test_an_error_comes_with_its_answer(session: Session) -> None:
    table = torch.ones(3, 2, device=REMOTE)
    wrong = fetch(torch.nn.functional.embedding(torch.tensor([9]).to(REMOTE), table))
    right = fetch(table * 2)
    with pytest.raises(IndexError):
        wrong()
    assert right().sum() == 12
    assert table.sum().item() == 6


def test_a_connection_that_the_pool_has_lost_is_not_made_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection: Any = session.connection
    before, x = connection.reconnections, torch.ones(3, device=REMOTE)
    failure = encode(CallFailure("ConnectionLostError", "rank 1 has hung up", "", 0).plain())
    answer = Frame(Kind.ERROR, connection._question + 1, memoryview(failure))
    with monkeypatch.context() as patch:
        patch.setattr(connection._channel, "receive", lambda: answer)
        with pytest.raises(PoolError, match="rank 1 has hung up"):
            connection.read_little(1, 0, 4)
    assert connection.reconnections == before
    assert x.sum().item() == 3


def test_an_answer_goes_on_over_lost_connections(session: Session, tiny_model: Path) -> None:
    options = ServiceOptions(dtype="float16", max_num_seqs=2)
    engine = build_engine(open_model(tiny_model, torch.device(REMOTE, 0), options), options)
    connection: Any = session.connection
    before = connection.reconnections
    (expected,) = engine.decode([[5, 6, 7]], 16)
    asked = request([5, 6, 7], tokens=16)
    engine.add(asked)
    while engine.has_work:
        engine.step()
        if len(asked.token_ids) % 5 == 2:
            connection._channel.close()
    assert asked.token_ids == expected
    assert connection.reconnections - before == 3
