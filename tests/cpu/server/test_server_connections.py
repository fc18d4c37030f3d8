"""What happens between the first and the last byte: clients that leave, streams that fail, limits, shutdown, TLS."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import h11
import httpx
import openai
import pytest
import trustme
import uvicorn
from serving_fakes import FakeService, Running, until
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from warpbus.errors import EngineDiedError, NumericError, QueueFullError, UnavailableError, UsageError
from warpbus.server.app import create_app
from warpbus.server.listening import _Http, _LimitedConnection, bind
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "a long answer"}]}
PATH = "/v1/chat/completions"


def data_of(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_left_ends_its_requests(served, n):
    service = served.service
    service.pause = asyncio.Event()
    with served.http() as http, http.stream("POST", PATH, json={**CHAT, "stream": True, "n": n}) as response:
        lines = response.iter_lines()
        next(lines)
        until(lambda: service.running == n)
    until(lambda: service.running == 0)
    assert service.ended == {"aborted": n}


def test_a_request_that_is_left_ends(served):
    service = served.service
    service.pause = asyncio.Event()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(post({**CHAT, "n": 2}))
        until(lambda: service.running == 2)
    until(lambda: service.running == 0)
    assert service.ended == {"aborted": 2}


def test_streams_get_a_comment_when_nothing_comes(served):
    served.service.pause = 0.3
    body = {**CHAT, "messages": [{"role": "user", "content": "ab"}], "stream": True}
    with served.http() as http, http.stream("POST", PATH, json=body) as response:
        lines = list(response.iter_lines())
    assert lines.count(": waiting") >= 2
    assert data_of(lines)[-1] == "[DONE]"
    with served.openai() as client:
        chunks = client.chat.completions.create(**body)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"


def test_an_engine_that_dies_amid_a_stream_ends_it_with_an_error(served):
    served.service.fails = (3, EngineDiedError("the engine died: it is being restarted"))
    with served.http() as http, http.stream("POST", PATH, json={**CHAT, "stream": True, "n": 2}) as response:
        assert response.status_code == 200
        events = data_of(response.iter_lines())
    assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
    assert served.service.running == 0
    with served.openai() as client, pytest.raises(openai.APIError, match="the engine died"):
        list(client.chat.completions.create(**CHAT, stream=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueFullError("full", retry_after=7.2), 429, "queue_full", "7"),
        (EngineDiedError("it died", retry_after=5.0), 503, "engine_unavailable", "5"),
        (EngineDiedError("it is given up"), 503, "engine_unavailable", None),
        (UnavailableError("closing"), 503, "engine_unavailable", "5"),
        (UsageError("the grammar is wrong"), 400, None, None),
        (NumericError("the scores are NaN"), 500, None, None),
        (RuntimeError("secret"), 500, None, None),
    ],
)
def test_what_fails_at_once_has_a_status(served, stream, error, status, code, retry):
    for fails in (error, (0, error)):
        served.service.fails = fails
        with served.http() as http:
            response = http.post(PATH, json={**CHAT, "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers.get("retry-after") == retry
        assert "secret" not in response.text


@pytest.mark.parametrize(("state", "retry"), [("restarting", "5"), ("failed", None)])
def test_a_model_that_is_down_is_unavailable(served, state, retry):
    served.service.state = state
    with served.http() as http:
        response = http.post(PATH, json=CHAT)
        assert (response.status_code, response.headers.get("retry-after")) == (503, retry)
        assert state in response.json()["error"]["message"]
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": state})
        assert health.headers.get("retry-after") == retry
        assert http.get("/metrics").status_code == 200
        assert http.post(PATH, json={**CHAT, "model": "glm-4"}).status_code == 200


def serving(**options):
    models = Models()
    service = FakeService()
    models.add("parrot", service)
    running = Running(models, ServerOptions(**options))
    running.service = service
    return running


def test_answers_that_take_too_long_are_ended():
    # Before it ends, a stream has to begin, on a busy machine too.
    with serving(request_timeout=2.0) as running, running.http() as http:
        running.service.pause = 0.5
        response = http.post(PATH, json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
        with http.stream("POST", PATH, json={**CHAT, "stream": True}) as response:
            events = data_of(response.iter_lines())
        assert json.loads(events[-1])["error"]["code"] == "timeout"
        until(lambda: running.service.running == 0)


def test_a_tokenizer_that_is_busy_does_not_hold_up_the_others():
    with serving() as running, running.http() as http:
        holding = threading.Event()
        plain = running.service.template.render

        def slow(messages, **how):
            holding.wait(60)
            return plain(messages)

        running.service.template.render = slow
        thread = threading.Thread(target=lambda: http.post(PATH, json=CHAT))
        thread.start()
        with running.http() as other:
            assert other.get("/health").status_code == 200
        assert running.service.asked == []
        holding.set()
        thread.join(60)
        assert len(running.service.asked) == 1


def post(body):
    """The bytes of a request."""
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def raw(running, data, *, timeout=60.0):
    """What comes back for some bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=timeout) as connection:
        connection.sendall(data)
        found = b""
        # What the server did not read resets the connection when it closes.
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                found += chunk
        return found


def test_slow_heads_and_slow_bodies_are_cut_off():
    with serving(body_timeout=1.0) as running:
        assert raw(running, b"GET /health HT") == b""
        assert raw(running, b"") == b""
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
        assert raw(running, head).startswith(b"HTTP/1.1 408 ")
        with running.http() as http:
            # An idle connection is no slow request.
            assert [http.get("/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(("stream", "length"), [(True, 100_000), (False, 3000)])
def test_a_client_that_reads_nothing_holds_neither_its_request_nor_its_connection(stream, length):
    with serving(body_timeout=0.3) as running:
        running.service.script = "x" * length
        running.service.max_model_len = 1 << 20
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(post({**CHAT, "stream": stream, "n": 16, "logprobs": True, "top_logprobs": 2}))
            until(lambda: running.service.ended.total() == 16, 90)
            until(lambda: not running.connections, 90)
        assert (running.service.ended["aborted"] > 0) is stream


def test_a_connection_is_kept_while_its_client_reads():
    async def run():
        aborted = asyncio.Event()
        unsent = [300, 200, 100, 100, 0]
        transport = SimpleNamespace(get_write_buffer_size=lambda: unsent.pop(0), abort=aborted.set)
        config = uvicorn.Config(create_app(Models()))
        connection = _LimitedConnection(most=1, seconds=0.01, config=config, server_state=ServerState(), app_state={})
        connection.transport = transport
        connection.flow = FlowControl(transport)
        connection.pause_writing()
        await aborted.wait()
        assert unsent == [0]

    asyncio.run(run())


def test_too_many_connections_are_refused():
    with serving(max_connections=2) as running:
        idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
        until(lambda: len(running.connections) == 2)
        found = raw(running, b"")
        assert found.startswith(b"HTTP/1.1 503 ")
        head, _, body = found.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["code"] == "too_many"
        for connection in idle:
            connection.close()
        with running.http() as http:
            until(lambda: http.get("/health").status_code == 200)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"A" * 200_000, b"\r\n" * 10]
)
def test_what_is_no_http_does_no_harm(data):
    with serving(body_timeout=0.3) as running:
        found = raw(running, data)
        assert found == b"" or found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))
        with running.http() as http:
            assert http.get("/health").status_code == 200


CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("chunk", [b"zz\r\nab\r\n", b"-1\r\nab\r\n", b"2\r\nabXX0\r\n\r\n", b"2\r\n{}\r\nzz\r\n"])
def test_malformed_chunks_are_refused(chunk, caplog):
    with serving() as running:
        head, _, body = raw(running, CHUNKED + chunk).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
        until(lambda: not running.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_malformed_chunks_of_a_body_that_was_refused_already_end_the_connection(caplog):
    with (
        serving(max_body_bytes=1000) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection,
    ):
        connection.sendall(CHUNKED + b"5dc\r\n" + b" " * 1500 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"zz\r\n")
        until(lambda: not running.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_asks_for_another_protocol_is_answered_in_this_one(caplog):
    with serving() as running, running.http() as http:
        asked = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
        assert http.get("/health", headers=asked).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_tls(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    options = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    ServerOptions(**options).check_tls()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with serving(**options) as running:
        url = f"https://127.0.0.1:{running.port}"
        with httpx.Client(base_url=url, verify=trust) as http:
            assert http.get("/health").status_code == 200
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
                chunks = client.chat.completions.create(**CHAT, stream=True)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a long answer"
        with httpx.Client(base_url=url.replace("https", "http")) as http, pytest.raises(httpx.HTTPError):
            http.get("/health")


def test_certificates_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(UsageError, match="cannot be used"):
        ServerOptions(ssl_certfile=tmp_path / "text.pem", ssl_keyfile=tmp_path / "text.pem").check_tls()
    with pytest.raises(UsageError, match="no such file"):
        ServerOptions(ssl_certfile=tmp_path / "none.pem", ssl_keyfile=tmp_path / "text.pem").check_tls()


def test_a_port_in_use_is_reported():
    with bind(ServerOptions(port=0)) as taken, pytest.raises(UsageError, match=r"listens at 127.0.0.1:\d+ already"):
        bind(ServerOptions(port=taken.getsockname()[1]))
    with pytest.raises(UsageError, match="--host"):
        bind(ServerOptions(host="203.0.113.1", insecure=True))


def test_a_server_that_has_to_end_waits_only_so_long(caplog):
    with caplog.at_level(logging.INFO), serving(shutdown_timeout=1.0) as running, ThreadPoolExecutor() as threads:
        running.service.pause = asyncio.Event()
        with running.http() as http, http.stream("POST", PATH, json={**CHAT, "stream": True, "n": 2}) as response:
            lines = response.iter_lines()
            next(lines)
            plain = threads.submit(httpx.post, f"{running.url}{PATH}", json=CHAT, timeout=90)
            until(lambda: running.service.running == 3)
            running.stop()
            error = json.loads(data_of(lines)[-1])["error"]
        assert (error["code"], error["type"]) == ("server_ends", "service_unavailable")
        refused = plain.result(90)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"] == error
    assert running.service.ended == {"aborted": 3}
    assert running.service.closed
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]
    logged = [record.getMessage() for record in caplog.records if record.name == "warpbus.access"]
    assert sorted(" 200 " in line and " error=server_ends " in f"{line} " for line in logged) == [False, True]


def test_a_request_that_is_not_generated_yet_is_reported_too(monkeypatch, caplog):
    monkeypatch.setattr("warpbus.server.listening._SECONDS_TO_TELL", 0)
    with serving(shutdown_timeout=1.0) as running, ThreadPoolExecutor() as threads:
        holding, begun = threading.Event(), threading.Event()

        def slow(messages, **how):
            begun.set()
            holding.wait(60)
            return [65]

        running.service.template.render = slow
        asked = threads.submit(httpx.post, f"{running.url}{PATH}", json=CHAT, timeout=90)
        assert begun.wait(60)
        running.stop()
        refused = asked.result(90)
        holding.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_ends")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_length_beside_chunks_is_refused_and_closes_the_connection():
    both = b"content-length: 5\r\ntransfer-encoding: chunked\r\n"
    hidden = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving() as running:
        for order in (both, b"transfer-encoding: chunked\r\ncontent-length: 0\r\n"):
            head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + order + b"\r\n"
            found = raw(running, head + b"0\r\n\r\n" + hidden)
            assert found.startswith(b"HTTP/1.1 400 ")
            assert b"connection: close" in found.lower()
            assert found.count(b"HTTP/1.1 ") == 1
            assert b"Content-Length and Transfer-Encoding" in found


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from serving_fakes import FakeService
from warpbus.engine.options import ServiceOptions
from warpbus.engine.service import Service
from warpbus.server.options import ServerOptions
from warpbus.server.listening import ModelToServe, serve

service = FakeService()
service.pause = 0.1

async def start(*_, **__):
    return service

Service.start = start
serve([ModelToServe("parrot", Path("none"))], ServerOptions(port=0), ServiceOptions(),
      progress=lambda name: None, ready=lambda url: print(url, flush=True))
print(dict(service.ended), service.closed)
"""


def test_a_signal_lets_answers_finish_and_the_process_ends_well():
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        with httpx.stream("POST", f"{url}{PATH}", json={**CHAT, "stream": True}, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            assert data_of(lines)[-1] == "[DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert process.wait(90) == 0
        assert process.stdout.read() == "{'done': 1} True\n"


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"])
@pytest.mark.parametrize("headers", [[], [("content-length", "3")], [("connection", "close")]])
def test_a_response_is_framed_as_h11_does(head, headers):
    def sent(connection):
        data = b""
        for _ in range(2):
            connection.receive_data(head + b"\r\nhost: a\r\n\r\n")
            while (
                connection.next_event() not in (h11.NEED_DATA, h11.PAUSED) and connection.their_state is h11.SEND_BODY
            ):
                pass
            body = [] if head.startswith(b"HEAD") else [b"", b"a", b"", b"bc"]
            data += connection.send(h11.Response(status_code=200, headers=headers))
            data += b"".join(connection.send(h11.Data(data=part)) for part in body)
            data += connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                break
            connection.start_next_cycle()
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"late"))
        return data

    assert sent(_Http(h11.SERVER)) == sent(h11.Connection(h11.SERVER))
