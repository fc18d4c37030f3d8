"""Encoded events: the bytes of the JSON that each is."""

import json

import pytest

from warpbus.server.sse import TextEvents, encode


def test_events_with_a_type_have_its_name() -> None:
    assert encode([{"type": "ping"}, {"a": "春"}, b"data: 1\n\n"]) == (
        'event: ping\ndata: {"type":"ping"}\n\ndata: {"a":"春"}\n\ndata: 1\n\n'.encode()
    )
    assert encode([]) == b""


@pytest.mark.parametrize("text", ["", "春", '"\\\n', "\x00\u2028", "data: \n\n", "😀 {}"])
def test_a_text_event_is_what_its_data_would_be(text: str) -> None:
    def make(content: str) -> dict[str, object]:
        return {"id": "x", "choices": [{"delta": {"content": content}, "usage": None}], "model": 'a "b"'}

    events = TextEvents(make)
    assert events.encode(text) == encode([make(text)])
    assert json.loads(events.encode(text).removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text
