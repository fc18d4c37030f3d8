"""A machine's daemon, with tenants' processes that hold nothing: connections, leases, their ends, and two daemons."""

import asyncio
import os
import random
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pool_fake_tenant as fake
import pytest
import trustme
from pool_daemons import MEMORY, entry, lease, say_hello, serving, until

from warpbus.errors import (
    AuthorizationError,
    ConnectionLostError,
    DeviceError,
    LeaseLostError,
    PoolError,
    UnavailableError,
    UsageError,
)
from warpbus.pool.daemon.daemon import Daemon
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.daemon.tenant_processes import TenantProcess
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.channel import connect
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.protocol.failures import sent_error
from warpbus.pool.protocol.frames import MAX_HELLO, PROTOCOL, Kind, pack_header
from warpbus.pool.protocol.messages import decode_dict, encode_request
from warpbus.pool.protocol.preamble import MAGIC
from warpbus.pool.protocol.wire import encode

ADMIN, ANN, BOB, EVE = "admin-token-0123456", "ann-token-01234567", "bob-token-01234567", "eve-token-01234567"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("mill")) as found:
        yield found


@pytest.fixture(scope="module")
def peers(served, tmp_path_factory):
    """Another machine in the same pool."""
    with serving(tmp_path_factory.mktemp("dam"), name="dam", peers=(str(served.address),)) as found:
        yield found


@pytest.fixture
def control(served):
    with served.control() as found:
        yield found


def test_a_client_gets_a_lease_and_reaches_its_process(served, control):
    assert control.welcome["tenant"] == "local"
    granted = lease(control)
    assert granted["gpu"] == "mill/0"
    assert granted["address"] == ""  # the one that was asked
    channel, kind, welcome = say_hello(served.address, granted)
    assert kind is Kind.WELCOME
    assert welcome["pid"] != os.getpid()
    found = until(lambda: (e := entry(control, granted)) and e["memory_used"] == 7 and e)
    assert (found["state"], found["gpu"], found["tenant"]) == ("placed", "mill/0", "local")
    assert control.ask("release", {"lease": granted["lease"]}) == {"released": granted["lease"]}
    with pytest.raises(ConnectionLostError):
        channel.receive(90)
    assert entry(control, granted) is None


def test_what_became_of_a_lease_is_reported_to_who_has_its_key(served, control):
    granted = lease(control)
    control.ask("release", {"lease": granted["lease"]})
    _, kind, said = say_hello(served.address, granted)
    assert (kind, said["type"]) == (Kind.REFUSED, "LeaseLostError")
    assert "it was released" in said["message"]
    _, kind, said = say_hello(served.address, {**granted, "key": b"another"})
    assert kind is Kind.REFUSED
    assert "knows nothing of" in said["message"]


def test_a_process_that_dies_takes_its_own_lease_alone(served, control):
    first, second = lease(control), lease(control)
    channels = [say_hello(served.address, each) for each in (first, second)]
    os.kill(channels[0][2]["pid"], signal.SIGKILL)
    until(lambda: entry(control, first) is None)
    assert entry(control, second)["state"] == "placed"
    with pytest.raises(ConnectionLostError):
        channels[0][0].receive(90)
    assert channels[1][0].receive(0.1) is None
    _, kind, said = say_hello(served.address, first)
    assert kind is Kind.REFUSED
    assert isinstance(sent_error(said), LeaseLostError)
    assert "killed by signal 9 (SIGKILL)" in said["message"]
    assert any(line["what"] == "lost" and line["lease"] == first["lease"] for line in served.audit())
    control.ask("release", {"lease": second["lease"]})


def test_who_comes_while_the_process_ends_hears_how_it_ended(served, control, monkeypatch):
    end = TenantProcess.end

    async def ends_slowly(process: TenantProcess) -> str:
        await asyncio.sleep(0.5)
        return await end(process)

    monkeypatch.setattr(TenantProcess, "end", ends_slowly)
    granted = lease(control)
    channel, _, said = say_hello(served.address, granted)
    os.kill(said["pid"], signal.SIGKILL)
    with pytest.raises(ConnectionLostError):
        channel.receive(90)
    tenancy = served.daemon.host.tenancies[granted["lease"]]
    until(lambda: not tenancy.process.alive)
    _, kind, said = say_hello(served.address, granted)
    assert kind is Kind.REFUSED
    assert "killed by signal 9 (SIGKILL)" in said["message"]


def test_a_process_that_does_not_start_is_an_error_and_no_lease(control):
    with pytest.raises(DeviceError, match="the GPU is on fire"):
        lease(control, fake.NEVER_READY)
    assert control.ask("status")["leases"] == []


def test_who_waits_is_reported_and_gets_the_room_that_is_freed(served, control):
    large = control.ask("lease", {"memory": 900_000_000, "share": 0.5}, timeout=60)
    reported, granted = [], []
    with served.control() as other:

        def wait() -> None:
            granted.append(other.ask("lease", {"memory": 900_000_000, "share": 0.5}, reported.append, timeout=60))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: reported)
        assert reported[0]["queued"] == 1
        assert "0.10 GB" in reported[0]["why"]
        with served.control() as third:  # hangs up, and so gives up its place
            impatient = threading.Thread(target=_ask_in_vain, args=(third,))
            impatient.start()
            until(lambda: len(control.ask("status")["queue"]) == 2)
        impatient.join()
        until(lambda: len(control.ask("status")["queue"]) == 1)
        control.ask("release", {"lease": large["lease"]})
        thread.join()
        control.ask("release", {"lease": granted[0]["lease"]})


def _ask_in_vain(control: ControlChannel) -> None:
    with pytest.raises(ConnectionLostError):
        control.ask("lease", {"memory": 900_000_000, "share": 0.5})


def test_a_lease_without_its_client_is_reclaimed(tmp_path):
    with serving(tmp_path, grace=1.5) as short, short.control() as control:
        kept, left = lease(control), lease(control)
        channel, _, _ = say_hello(short.address, kept)
        other, _, welcome = say_hello(short.address, left)
        other.close()
        until(lambda: entry(control, left) is None)
        assert entry(control, kept)["state"] == "placed"
        until(lambda: not Path(f"/proc/{welcome['pid']}").exists())
        assert any(line["what"] == "reclaimed" and line["lease"] == left["lease"] for line in short.audit())
        _, _, said = say_hello(short.address, left)
        assert "not seen for" in said["message"]
        channel.close()


def test_suspended_and_resumed_after_a_restart(tmp_path):
    with serving(tmp_path) as before, before.control() as control:
        granted, lost = lease(control), lease(control)
        done = control.ask("suspend", {"lease": granted["lease"]})
        assert done == {"suspended": granted["lease"], "seconds": 0.1, "bytes": 5}
        assert entry(control, granted)["state"] == "suspended"
        _, kind, said = say_hello(before.address, granted)
        assert (kind, said["type"]) == (Kind.REFUSED, "ConnectionLostError")  # it may be tried again
        assert "is suspended" in said["message"]
    with serving(tmp_path) as after, after.control() as control:
        assert entry(control, lost) is None
        again = control.ask("resume", {"lease": granted["lease"], "on": None}, timeout=60)
        assert again == granted
        assert say_hello(after.address, again)[2]["saved"] is True
        assert list((tmp_path / "suspended").iterdir()) == []


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        (5, {}, "does not understand 5"),
        ("dance", {}, "does not understand 'dance'"),
        ("lease", {}, "memory is None: give int"),
        ("lease", {"memory": "8GB", "share": 0.5}, "memory is '8GB': give int"),
        ("lease", {"memory": True, "share": 0.5}, "memory is True: give int"),
        ("lease", {"memory": 1000, "share": None}, r"share is None: give int \| float"),
        ("lease", {"memory": 0, "share": 0.5}, "memory"),
        ("lease", {"memory": 2**62, "share": 0.5}, "ask for that at most"),
        ("lease", {"memory": 1000, "share": float("nan")}, "share"),
        ("lease", {"memory": 1000, "share": 0.5, "on": "nowhere/0"}, "nowhere"),
        ("lease", {"memory": 1000, "share": 0.5, "now": 0.0}, "no argument 'now'"),
        ("release", {"lease": "unknown"}, "unknown"),
        ("migrate", {"lease": b"", "to": 3}, "lease is b''"),
        ("end", {"lease": "../../etc", "why": ""}, "32 hexadecimal digits"),
        ("receive", {"lease": "ff"}, "key is None: give bytes"),
        ("join", {"host": "x", "gpus": 3}, "gpus is 3: give list|address is None"),
        ("drain", {"host": "nowhere"}, "nowhere"),
        ("forward", {"operation": "lease", "arguments": {}, "tenant": "x", "role": "god", "address": ""}, "role is"),
    ],
)
def test_nonsense_is_answered_with_an_error(control, operation, arguments, message):
    with pytest.raises((UsageError, DeviceError), match=message):
        control.ask(operation, arguments, timeout=90)
    assert control.ask("status")["leases"] == []


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC, MAGIC + bytes(16) + b"\xff" * 400])
def test_preambles_of_garbage(served, control, sent):
    with socket.create_connection((served.address.host, served.address.port)) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(90)
        with suppress(ConnectionResetError):
            assert len(sock.recv(1 << 16)) < 1000
    assert control.ask("status")["queue"] == []


def test_mutated_conversations_do_not_stop_it(served, control):
    """Every byte after the preamble may be another one."""
    frames = [
        (Kind.HELLO, encode({"protocol": PROTOCOL, "token": None})),
        (Kind.ASK, encode_request("status", {})),
        (Kind.ASK, encode_request("lease", {"memory": 5, "share": 0.5, "on": "no/0"})),
        (Kind.ASK, encode_request("release", {"lease": "ab"})),
    ]
    good = b"".join(pack_header(kind, 1, len(payload)) + payload for kind, payload in frames)
    chance = random.Random(7)
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 8))):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        with socket.create_connection((served.address.host, served.address.port), timeout=90) as sock:
            sock.sendall(MAGIC + bytes(16) + bad[: chance.randrange(len(bad))])
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass
    assert control.ask("status")["queue"] == []
    assert served.run(_count(served.daemon)) < 20


def test_a_hello_of_another_protocol_is_refused_with_the_version(served):
    """Protocol 1 had an encoding of its own, in which this is {"protocol": 1}."""
    first = b"\x0b\x01\x00\x00\x00\x08\x00\x00\x00protocol\x03\x01" + bytes(7)
    for hello in (first, encode({"protocol": 1, "token": None}), encode(["protocol", PROTOCOL])):
        channel = connect(served.address, timeout=90)
        channel.send(Kind.HELLO, 0, hello)
        answer = channel.receive(90)
        assert answer.kind is Kind.REFUSED
        assert f"speaks protocol {PROTOCOL}: use the same version" in decode_dict(answer.payload)["message"]
        channel.close()


def test_half_open_connections_do_not_keep_others_out(tmp_path):
    with serving(tmp_path, max_unfinished=50, spare=0) as small, ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(socket.create_connection((small.address.host, small.address.port)))
            sock.sendall(b"WARPB")
        with small.control() as control:
            assert control.ask("status")["leases"] == []
        assert small.run(_count(small.daemon)) <= 55


async def _count(daemon: Daemon) -> int:
    return len(daemon._tasks)


def test_idle_connections_of_others_do_not_keep_a_client_from_its_lease(served, control):
    granted = lease(control)
    with ExitStack() as stack:
        for count in range(40):
            sock = stack.enter_context(socket.create_connection((served.address.host, served.address.port)))
            sock.sendall(MAGIC + bytes.fromhex(granted["lease"]))
            if count % 2:
                sock.sendall(bytes(32))  # an answer to the nonce, without the key
        for _ in range(3):
            channel, kind, _ = say_hello(served.address, granted)
            assert kind is Kind.WELCOME
            channel.close()
    control.ask("release", {"lease": granted["lease"]})


def test_who_lacks_the_key_never_reaches_the_process(served, control):
    granted = lease(control)
    _, kind, said = say_hello(served.address, {**granted, "key": b"another"})
    assert kind is Kind.REFUSED
    assert "knows nothing of it with this key" in said["message"]
    connections = [line for line in served.audit() if line["what"] == "connection"]
    assert not any(line.get("lease") == granted["lease"] for line in connections)
    assert say_hello(served.address, granted)[1] is Kind.WELCOME
    control.ask("release", {"lease": granted["lease"]})


@pytest.mark.parametrize("lease_id", [bytes(16), bytes(range(16))])
def test_a_large_hello_is_not_read(served, control, lease_id):
    """Neither that of a control connection, before its token, nor that of whoever asks for a lease without its key."""
    payload = encode({"protocol": PROTOCOL, "token": "x" * MAX_HELLO})
    with socket.create_connection((served.address.host, served.address.port), timeout=90) as sock:
        sock.sendall(MAGIC + lease_id)
        if any(lease_id):
            assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
            sock.sendall(bytes(32))
        with suppress(ConnectionResetError):  # closed with something unread
            sock.sendall(pack_header(Kind.HELLO, 0, len(payload)) + payload)
            assert sock.recv(1000) == b""  # neither WELCOME nor REFUSED


def test_who_asks_for_leases_too_often_has_to_wait(tmp_path):
    with serving(tmp_path, max_lease_rate=3.0) as slow, slow.control() as control:
        for _ in range(3):
            control.ask("release", {"lease": lease(control)["lease"]})
        with pytest.raises(UnavailableError, match=r"tenant local asks for leases too often.* try again in 1?\d\.\d s"):
            lease(control)
        assert control.ask("status")["leases"] == []


def test_silent_connections_are_closed(tmp_path):
    with serving(tmp_path, handshake_timeout=0.3, spare=0) as quick:
        for sent in (b"WARPB", MAGIC + bytes(16)):
            with socket.create_connection((quick.address.host, quick.address.port), timeout=90) as sock:
                sock.sendall(sent)
                assert sock.recv(1000) == b""


def test_tokens_limits_and_tls(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    certificate, key, trust = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(trust)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ADMIN} ops admin\n{ANN} ann memory=15MB leases=2\n{BOB} bob\n{EVE} eve viewer\n")
    tokens.chmod(0o600)
    with serving(tmp_path, certificate=certificate, key=key, tokens=tokens, advertise="localhost") as secured:
        assert secured.address.transport == "tls"
        secured.address = address(f"{secured.address}?ca={trust}")
        for wrong in (None, "nobodys-token-0123"):
            with pytest.raises(UsageError, match="does not accept the token"):
                secured.control(wrong)
        with secured.control(ANN) as ann, secured.control(BOB) as bob, secured.control(ADMIN) as admin:
            granted = lease(ann)
            _, kind, _ = say_hello(secured.address, granted)
            assert kind is Kind.WELCOME
            with pytest.raises(UsageError, match="ann asks for"):
                lease(ann)
            assert ann.ask("status")["left"] == {"memory": 15_000_000 - MEMORY, "share": None}
            assert entry(ann, granted)["tenant"] == "ann"
            seen = bob.ask("status")
            assert [(each["id"], each["tenant"], each["memory"]) for each in seen["leases"]] == [
                ("other-1", "(other)", MEMORY)
            ]
            assert granted["lease"] not in str(seen)
            with secured.control(EVE) as eve:
                assert entry(eve, granted)["tenant"] == entry(admin, granted)["tenant"] == "ann"
                with pytest.raises(UsageError, match="a viewer may only ask for the status"):
                    lease(eve)
            for operation, arguments in (("release", {}), ("migrate", {"to": "mill/0"}), ("suspend", {})):
                with pytest.raises(UsageError, match="another tenant"):
                    bob.ask(operation, {**arguments, "lease": granted["lease"]})
            release = {"operation": "release", "arguments": {"lease": granted["lease"]}}
            for operation, arguments in {
                "drain": {"host": "mill"},
                "broker": {},
                "order": {"lease": granted["lease"]},
                "end": {"lease": granted["lease"], "why": ""},
                "forward": {**release, "tenant": "ann", "role": "admin", "address": ""},
            }.items():
                with pytest.raises(UsageError, match=f"{operation}: only an admin"):
                    bob.ask(operation, arguments)
            with pytest.raises(UsageError, match="another tenant"):
                admin.ask("forward", {**release, "tenant": "bob", "role": "tenant", "address": ""})
            admin.ask("release", {"lease": granted["lease"]})
        with pytest.raises(AuthorizationError, match="not trusted"):
            ControlChannel(address(secured.daemon.address), ANN)
        with pytest.raises(ConnectionLostError, match="if it has a certificate, give its address as warpbuss://"):
            ControlChannel(replace(secured.address, transport="plain", ca=None), ANN)
        said = (tmp_path / "audit.jsonl").read_text()
        assert not any(secret in said for secret in (ADMIN, ANN, BOB, granted["key"].hex()))


def test_beyond_this_machine_it_wants_tokens_and_tls():
    with pytest.raises(UsageError, match="give --certificate, --key and --tokens"):
        PoolOptions(host="0.0.0.0")


def test_a_unix_socket_that_only_this_user_opens(tmp_path):
    path = tmp_path / "pool.sock"
    with serving(tmp_path, unix=path, spare=0):
        assert path.stat().st_mode & 0o777 == 0o600
        with ControlChannel(address(f"warpbus+unix://{path}"), None) as control:
            granted = lease(control)
            assert say_hello(address(f"warpbus+unix://{path}"), granted)[1] is Kind.WELCOME
    assert not path.exists()


def test_a_lease_moves_to_another_machine(served, peers, control):
    granted = lease(control, on="mill")
    channel, _, before = say_hello(served.address, granted)
    reported = []
    done = control.ask("migrate", {"lease": granted["lease"], "to": "dam/0"}, reported.append, timeout=60)
    assert (done["moved"], done["pause"], done["bytes"]) == ("dam/0", 0.01, 123)
    assert {"phase": "copying", "done": 1, "total": 2} in reported
    assert entry(control, granted)["gpu"] == "dam/0"
    with pytest.raises(ConnectionLostError):
        channel.receive(90)
    _, kind, said = say_hello(served.address, granted)  # it knows where it went
    assert (kind, said) == (Kind.MOVED, {"address": peers.daemon.address, "final": True})
    _, kind, after = say_hello(peers.address, granted)
    assert (kind, after["gpu"]) == (Kind.WELCOME, "dam/0")
    assert after["pid"] != before["pid"]
    moved = [line for line in served.audit() if line["what"] == "migration" and line["lease"] == granted["lease"]]
    assert [(line["source"], line["target"], line["moved"]) for line in moved] == [("mill/0", "dam/0", True)]
    control.ask("release", {"lease": granted["lease"]})
    until(lambda: not Path(f"/proc/{after['pid']}").exists())


def test_a_move_that_is_refused_leaves_the_lease_where_it_lives(served, peers, control):
    granted = lease(control, fake.REFUSES_TO_MOVE, on="mill")
    with pytest.raises(DeviceError, match="it does not want to"):
        control.ask("migrate", {"lease": granted["lease"], "to": "dam"}, timeout=60)
    assert entry(control, granted)["gpu"] == "mill/0"
    assert say_hello(served.address, granted)[1] is Kind.WELCOME
    assert say_hello(peers.address, granted)[1] is Kind.REFUSED
    control.ask("release", {"lease": granted["lease"]})


def test_the_source_dies_when_the_target_lives(served, peers, control):
    granted = lease(control, fake.DIES_AFTER, on="mill")
    assert control.ask("migrate", {"lease": granted["lease"], "to": "dam"}, timeout=60)["moved"] == "dam/0"
    assert entry(control, granted)["gpu"] == "dam/0"
    assert say_hello(peers.address, granted)[1] is Kind.WELCOME
    control.ask("release", {"lease": granted["lease"]})


def test_the_source_dies_before_and_the_lease_is_lost_once(served, peers, control):
    served.run(_patience(served.daemon, 0.5))
    granted = lease(control, fake.DIES_BEFORE, on="mill")
    with pytest.raises(LeaseLostError, match="died while it moved"):
        control.ask("migrate", {"lease": granted["lease"], "to": "dam"}, timeout=60)
    assert entry(control, granted) is None
    for where in (served.address, peers.address):
        assert say_hello(where, granted)[1] is Kind.REFUSED


def test_a_source_that_dies_while_it_copies_ahead_is_not_waited_for(served, peers, control):
    served.run(_patience(served.daemon, 60.0))
    granted = lease(control, fake.DIES_EARLY, on="mill")
    with pytest.raises(LeaseLostError, match="died while it moved"):
        control.ask("migrate", {"lease": granted["lease"], "to": "dam"}, timeout=45)
    assert entry(control, granted) is None
    for where in (served.address, peers.address):
        assert say_hello(where, granted)[1] is Kind.REFUSED


async def _patience(daemon: Daemon, seconds: float) -> None:
    daemon._handler._moving._claim = seconds


def test_a_machine_is_drained(served, peers, control):
    granted = [lease(control, on="dam"), lease(control, on="dam")]
    assert all(each["address"] == peers.daemon.address for each in granted)
    with peers.control() as other:  # which hands it on to the one that has the broker
        done = other.ask("drain", {"host": "dam"}, timeout=60)
        assert (done["drained"], done["moves"], done["failed"]) == ("dam", 2, {})
        assert {entry(other, each)["gpu"] for each in granted} == {"mill/0"}
        other.ask("undrain", {"host": "dam"})
    for each in granted:
        control.ask("release", {"lease": each["lease"]})


def test_a_process_that_dies_on_another_machine_is_heard_of(served, peers, control):
    granted = lease(control, on="dam")
    channel, _, welcome = say_hello(peers.address, granted)
    until(lambda: entry(control, granted)["memory_used"] == 7)
    os.kill(welcome["pid"], signal.SIGKILL)
    until(lambda: entry(control, granted) is None)
    with pytest.raises(ConnectionLostError):
        channel.receive(90)


@pytest.mark.parametrize("wrong", [0, fake.DIES_AFTER])
def test_a_lease_moves_within_a_machine(tmp_path, wrong):
    with serving(tmp_path, gpus=2) as two, two.control() as control:
        granted = lease(control, wrong)
        _, _, before = say_hello(two.address, granted)
        target = "mill/1" if granted["gpu"] == "mill/0" else "mill/0"
        done = control.ask("migrate", {"lease": granted["lease"], "to": target}, timeout=60)
        assert done["moved"] == target
        _, kind, after = say_hello(two.address, granted)
        assert (kind, after["gpu"]) == (Kind.WELCOME, target)
        assert after["pid"] != before["pid"]
        until(lambda: not Path(f"/proc/{before['pid']}").exists())
        assert entry(control, granted)["gpu"] == target
        control.ask("release", {"lease": granted["lease"]})
        until(lambda: not Path(f"/proc/{after['pid']}").exists())


@pytest.mark.parametrize("wrong", [fake.REFUSES_TO_MOVE, fake.LOSES_THE_OTHER])
def test_a_move_within_a_machine_that_fails(tmp_path, wrong):
    with serving(tmp_path, gpus=2) as two, two.control() as control:
        two.daemon._handler._moving._claim = 1e6  # the lease lives: nobody has to claim it
        granted = lease(control, wrong, on="mill/0")
        with pytest.raises((DeviceError, PoolError), match="it does not want to"):
            control.ask("migrate", {"lease": granted["lease"], "to": "mill/1"}, timeout=60)
        assert say_hello(two.address, granted)[2]["gpu"] == "mill/0"
        assert len(two.daemon.host.tenancies) == 1


def test_a_move_to_a_machine_that_cannot_be_reached(served, peers, control, monkeypatch):
    monkeypatch.setattr(served.daemon._handler._moving, "_claim", 1e6)
    granted = lease(control, on="mill")

    async def elsewhere(order):
        return f"warpbus://127.0.0.1:{_free_port()}"

    monkeypatch.setattr(peers.daemon.host, "receive", elsewhere)
    with pytest.raises(PoolError, match=r"stays: .* cannot be reached"):
        control.ask("migrate", {"lease": granted["lease"], "to": "dam"}, timeout=60)
    assert say_hello(served.address, granted)[2]["gpu"] == "mill/0"
    control.ask("release", {"lease": granted["lease"]})


def test_the_broker_is_started_again_and_others_keep_their_leases(tmp_path):
    port = _free_port()
    with serving(tmp_path / "mill", port=port, spare=0) as before, before.control() as control, ExitStack() as stack:
        dam = stack.enter_context(serving(tmp_path / "dam", name="dam", peers=(str(before.address),)))
        granted = lease(control, on="dam")
        channel, _, welcome = say_hello(dam.address, granted)
        before.close()
        before.close = lambda: None
        assert channel.receive(0.1) is None
        with serving(tmp_path / "mill", port=port, spare=0) as after, after.control() as again:
            other = lease(again, on="dam")  # although the other machine may not have reported yet
            until(lambda: (found := entry(again, granted)) and found["memory_used"] == 7)
            assert say_hello(dam.address, granted)[2]["pid"] == welcome["pid"]
            for each in (granted, other):
                again.ask("release", {"lease": each["lease"]}, timeout=60)
            assert not dam.daemon.host.tenancies


def test_a_directory_has_one_daemon(tmp_path):
    with serving(tmp_path, spare=0), pytest.raises(UsageError, match="another daemon uses it"):
        Daemon(PoolOptions(directory=tmp_path))


def test_daemons_that_know_each_other_find_one_broker(tmp_path):
    ports = [_free_port(), _free_port()]
    found = []

    def start(name: str, mine: int, other: int) -> None:
        options = {"name": name, "port": mine, "peers": (f"warpbus://127.0.0.1:{other}",), "spare": 0}
        found.append(stack.enter_context(serving(tmp_path / name, **options)))

    with ExitStack() as stack:
        threads = [
            threading.Thread(target=start, args=("a", *ports)),
            threading.Thread(target=start, args=("b", *ports[::-1])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for served in found:
            with served.control() as control:
                assert {gpu["name"] for gpu in control.ask("status")["gpus"]} == {"a/0", "b/0"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]
