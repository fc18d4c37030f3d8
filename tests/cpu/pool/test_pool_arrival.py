"""What a source sends is trusted as little as what a client sends."""

import random
import socket

import pytest
from pool_random_lease import QUOTA, TOKEN, Lease

from warpbus.errors import LeaseLostError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import PROTOCOL, Kind
from warpbus.pool.protocol.wire import Value, decode, encode
from warpbus.pool.tenant import migration_messages
from warpbus.pool.tenant.migration_destination import DestinationState, MigrationDestination


def raw_destination(memory: int = QUOTA) -> tuple[Channel, MigrationDestination]:
    """A destination and the channel of a source that it has admitted, for a test to say what it likes."""
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    destination = MigrationDestination(Lease(memory), migration_token=TOKEN, reads=lambda _: None)
    hello: dict[str, Value] = {
        "protocol": PROTOCOL,
        "migration_token": TOKEN,
        "device": "cpu",
        "used": 0,
        "shared": None,
    }
    assert destination.admit(theirs, hello)
    welcome = ours.receive(1.0)
    assert welcome is not None
    assert welcome.kind is Kind.WELCOME
    return ours, destination


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"migration_token": b"x" * 32}, "not the migration token"),
        ({"migration_token": "t" * 32}, "not the migration token"),
        ({}, "not the migration token"),
        ({"migration_token": TOKEN, "protocol": 1}, "protocol 1 is not"),
        ({"migration_token": TOKEN, "protocol": PROTOCOL, "device": "cuda"}, "'cuda'"),
        ({"migration_token": TOKEN, "protocol": PROTOCOL, "device": "cpu", "used": QUOTA + 1}, "are reserved"),
    ],
)
def test_a_source_that_is_not_expected_is_refused_and_changes_nothing(hello: dict[str, Value], message: str) -> None:
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    destination = MigrationDestination(Lease(), migration_token=TOKEN, reads=lambda _: None)
    assert not destination.admit(theirs, hello)
    answer = ours.receive(1.0)
    assert answer is not None
    assert answer.kind is Kind.REFUSED
    refusal = decode(answer.payload)
    assert isinstance(refusal, dict)
    assert message in str(refusal["message"])
    assert destination.state is DestinationState.WAITING


def test_a_ticket_is_good_for_one_connection() -> None:
    _, destination = raw_destination()
    again, theirs = (Channel(sock) for sock in socket.socketpair())
    assert not destination.admit(theirs, {"protocol": PROTOCOL, "migration_token": TOKEN, "device": "cpu", "used": 0})
    answer = again.receive(1.0)
    assert answer is not None
    assert "used before" in str(decode(answer.payload))
    assert destination.state is DestinationState.RECEIVING


GOOD = bytes(range(100))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([("create", [1, QUOTA + 1], b"")], "do not fit"),
        ([("create", [1, 10, 1, 10], b"")], "in use"),
        ([("create", [1], b"")], "groups of 2"),
        ([("create", [1, -4], b"")], "groups of 2"),
        ([("create", [1, True], b"")], "groups of 2"),
        ([("drop", [3], b"")], "has not made"),
        ([("bytes", [0, 5, 1, 0, 4], b"four")], "damaged"),
        ([("bytes", [migration_messages.checksum([b"four"]), 5, 1, 0, 4], b"four")], "has not made"),
        (
            [("create", [1, 3], b""), ("bytes", [migration_messages.checksum([b"four"]), 1, 1, 0, 4], b"four")],
            "was to follow",
        ),
        (
            [("create", [1, 9], b""), ("bytes", [migration_messages.checksum([b"four"]), 1, 1, 2, 4], b"four")],
            "was to follow",
        ),
        (
            [("create", [1, 9], b""), ("bytes", [migration_messages.checksum([b"four"]), 1, 1, 0, 5], b"four")],
            "4 bytes for",
        ),
        ([("copy", [[], 1, 1, 0, 4, 0, 0], b"")], "not agreed"),
        ([("state", [1], b"x")], "damaged"),
        ([("something", [], b"")], "something"),
        ([("end", [0, 0, 1], b"")], "an end of"),
        ([("create", [1, 9], b""), ("end", [0, 0, 0], b"")], "a manifest of 0"),
        ([("commit", [], b"")], "commit"),
    ],
)
def test_a_source_that_lies_gets_no_lease_here(said: list[tuple[str, list[Value], bytes]], message: str) -> None:
    ours, destination = raw_destination()
    for what, values, raw in said:
        migration_messages.say(ours, 1, what, *values, raw=[raw])
        destination.step(1.0)
    assert destination.state is DestinationState.DISCARDED
    assert message in destination.reason
    answer = ours.receive(1.0)
    assert answer is not None
    assert answer.kind is Kind.ERROR
    with pytest.raises(LeaseLostError, match="did not arrive"):
        destination.claim()


def test_a_storage_of_which_a_part_is_missing_is_no_lease() -> None:
    ours, destination = raw_destination()
    migration_messages.say(ours, 1, "create", 1, 100)
    migration_messages.say(ours, 2, "bytes", migration_messages.checksum([GOOD[:60]]), 1, 7, 0, 60, raw=[GOOD[:60]])
    manifest, state = migration_messages.ENTRY.pack(1, 100, 7), encode({"executed": 0})
    migration_messages.say(ours, 3, "state", migration_messages.checksum([state]), raw=[state])
    migration_messages.say(ours, 4, "manifest", migration_messages.checksum([manifest]), raw=[manifest])
    migration_messages.say(ours, 5, "end", 0, len(state), 1)
    for _ in range(5):
        destination.step(1.0)
    assert destination.state is DestinationState.DISCARDED
    assert "did not arrive in full" in destination.reason


def test_a_part_of_an_earlier_storage_does_not_complete_a_later_one() -> None:
    """Its other bytes would be what somebody else had in that memory."""
    ours, destination = raw_destination()
    state, manifest = encode({"executed": 0}), migration_messages.ENTRY.pack(1, 100, 8)
    said: list[tuple[str, list[Value], bytes]] = [
        ("create", [1, 100], b""),
        ("bytes", [migration_messages.checksum([GOOD]), 1, 7, 0, 100], GOOD),
        ("changed", [1, 7, 8, 0, 10], b""),
        ("drop", [1], b""),
        ("create", [1, 100], b""),
        ("bytes", [migration_messages.checksum([GOOD[:10]]), 1, 8, 0, 10], GOOD[:10]),
        ("state", [migration_messages.checksum([state])], state),
        ("manifest", [migration_messages.checksum([manifest])], manifest),
        ("end", [0, len(state), 1], b""),
    ]
    for number, (what, values, raw) in enumerate(said):
        migration_messages.say(ours, number, what, *values, raw=[raw])
        destination.step(1.0)
    assert destination.state is DestinationState.DISCARDED
    assert "did not arrive in full" in destination.reason


def test_frames_of_rubbish_end_in_a_sentence() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ours, destination = raw_destination()
        ours.send(Kind.STATE, 1, rng.randbytes(rng.randrange(60)))
        assert destination.step(1.0) is DestinationState.DISCARDED
        assert "\n" not in destination.reason
