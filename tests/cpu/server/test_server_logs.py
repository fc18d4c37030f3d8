"""The log as JSON: one object per line, with a request's fields."""

import io
import json
import logging
from datetime import datetime

import pytest

from warpbus.errors import UsageError
from warpbus.server.logs import JsonFormatter, formatter
from warpbus.server.options import ServerOptions

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "a secret\nof two lines"}]}


@pytest.fixture
def lines():
    """The lines of the log, parsed, as they are written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter("json"))
    logger = logging.getLogger("warpbus")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_request_is_a_line_of_fields(served, lines):
    with served.http(headers={"x-request-id": "id-1"}) as http:
        http.post("/v1/chat/completions", json={**CHAT, "strange": 1})
        http.get("/nothing")
    answered, missing = lines()
    assert datetime.fromisoformat(answered.pop("time")).utcoffset().total_seconds() == 0
    assert 0 <= answered.pop("ttft") <= answered.pop("time_s")
    assert answered == {
        "level": "INFO",
        "logger": "warpbus.access",
        "message": "request",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "id": "id-1",
        "model": "parrot",
        "prompt": len(served.service.asked[-1][0]),
        "cached": 3,
        "output": 13,
        "ignored": "strange",
    }
    assert missing["status"] == 404
    assert "model" not in missing


def test_other_lines_have_their_message_and_traceback():
    logger, stream = logging.getLogger("test of json"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        logger.exception("it 春 failed")
    [line] = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("ERROR", "it 春 failed")
    assert found["exception"].endswith("ValueError: one\ntwo")


def test_text_is_the_default():
    assert not isinstance(formatter(ServerOptions().log_format), JsonFormatter)
    with pytest.raises(UsageError, match="--log-format is 'xml': give text or json"):
        ServerOptions(log_format="xml")
