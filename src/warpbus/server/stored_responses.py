"""Responses that the server keeps in memory, so that a later request can continue them by their id."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 64 << 20
"""The most bytes of JSON that are kept, whatever the number of responses."""


@dataclass(frozen=True)
class StoredResponse:
    """A response.

    Attributes:
        body: as it was sent.
        messages: the conversation up to its end, in the form of chat completions, without `instructions`.
        owner: the API key that may read it, as `cache_salt` has it.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    owner: bytes


class StoredResponses:
    """The last responses of a server by their ids; the least recently used ones are dropped.

    Args:
        most: the most responses. 0: nothing is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def add(self, response: StoredResponse) -> None:
        """Keep a response, unless it alone is longer than all may be."""
        size = len(json.dumps([response.body, response.messages]))
        if self._most == 0 or size > MOST_BYTES:
            return
        self._found[response.body["id"]] = (response, size)
        self._bytes += size
        while len(self._found) > self._most or self._bytes > MOST_BYTES:
            self._bytes -= self._found.popitem(last=False)[1][1]

    def get(self, name: str, owner: bytes) -> StoredResponse | None:
        """The response of an id; None if it is not kept, or another key's."""
        found, _ = self._found.get(name, (None, 0))
        if found is None or found.owner != owner:
            return None
        self._found.move_to_end(name)
        return found

    def remove(self, name: str) -> None:
        """Drop a response that is kept."""
        self._bytes -= self._found.pop(name)[1]
