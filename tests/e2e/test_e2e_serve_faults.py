"""`warpbus serve` whose engine stands still, dies, or cannot be started: `/health` says so, and SIGTERM ends it."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

SECONDS = 400.0


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """A server of the poet, and what it says on stderr."""

    def __init__(self, temporary):
        port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS)
        command = [sys.executable, "-m", "warpbus", "serve", "demo", "--port", str(port), "--device", "cpu"]
        command += ["--max-num-seqs", "4", "--watchdog-timeout", "15"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said = []
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    def until(self, status):
        """What `/health` says once it says `status`."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, "".join(self.said)
            try:
                response = self.http.get("/health")
            except httpx.TransportError:  # it does not listen yet
                pass
            else:
                if response.json()["status"] == status:
                    assert response.status_code == (200 if status == "ready" else 503)
                    return response.json()
            time.sleep(0.1)
        pytest.fail(f"{status} never came: {''.join(self.said)}")

    def engine(self):
        [engine] = psutil.Process(self.process.pid).children()
        return engine

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


@pytest.fixture
def server(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    started = Server(temporary)
    yield started
    started.http.close()
    started.process.kill()
    started.process.wait()


def test_an_engine_that_stops_is_started_again_until_it_cannot_be(server, tmp_path):
    server.until("ready")
    first = server.engine()
    first.suspend()
    reason = server.until("unresponsive")["reason"]
    assert re.fullmatch(r"glm-poet: process 0 on cpu has sent no heartbeat for \d+ s", reason)
    state = server.http.get("/metrics").text
    assert 'warpbus:model_state{model_name="glm-poet",state="unresponsive"} 1.0' in state
    assert 'warpbus:model_state{model_name="glm-poet",state="ready"} 0.0' in state
    server.until("ready")
    assert server.engine() != first
    for left in (tmp_path / "temporary").iterdir():
        left.rename(tmp_path / left.name)
    (tmp_path / "temporary").rmdir()
    server.engine().kill()
    assert "a process cannot be started" in server.until("failed")["reason"]
    assert server.terminate() == 0


@pytest.mark.parametrize("state", ["starting", "restarting", "a stopped engine"])
def test_sigterm_ends_a_server_in_any_state(server, tmp_path, state):
    if state == "starting":
        server.until("starting")
    else:
        server.until("ready")
        if state == "restarting":
            server.engine().kill()
            server.until("restarting")
        else:
            server.engine().suspend()
    assert server.terminate() == 0
    assert list((tmp_path / "temporary").glob("warpbus-*")) == []
