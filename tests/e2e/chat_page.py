"""The chat page as a test handles it."""

import re
from typing import Any

from fake_chat_server import FakeChatServer

NO_PROBLEMS: list[str] = []


class Chat:
    """A browser of its own on the page of `server`; `problems` is what its console complained of."""

    def __init__(self, chromium: Any, server: FakeChatServer, **context: Any) -> None:
        options = {"locale": "en-US", "reduced_motion": "reduce", "viewport": {"width": 1280, "height": 800}}
        self.server = server
        self.page = chromium.new_context(**{**options, **context}).new_page()
        self.page.set_default_timeout(60_000)
        self.problems: list[str] = []
        self.page.on("console", self._complained)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.fresh()

    def _complained(self, message: Any) -> None:
        # The picture that `fresh` visits names no icon, so Chromium asks for one, once and at a time of its own.
        if not message.location["url"].endswith("/favicon.ico"):
            self.problems.append(message.text)

    def fresh(self) -> None:
        """The page as on the first visit."""
        self.page.goto(f"{self.server.url}/page/mark.svg")
        self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self.problems.clear()
        self.page.goto(self.server.url)
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_function("() => document.querySelector('#model').value")

    def close(self) -> None:
        self.page.context.close()

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.focus("#question")
        self.page.keyboard.press("Enter")

    def answered(self, text: str = "") -> None:
        """Waits until the last message is a finished answer, of `text` if any."""
        self.page.wait_for_function(
            "text => { const last = document.querySelector('#messages > :last-child');"
            " return last?.matches('.answer:not(.streaming)') && last.textContent.includes(text); }",
            arg=text,
        )

    def say(self, question: str) -> None:
        before = self.page.locator(".answer").count()
        self.ask(question)
        self.page.wait_for_function("n => document.querySelectorAll('.answer').length > n", arg=before)
        self.answered()

    def texts(self) -> list[str]:
        """Questions and answers, in their order."""
        return [text.strip() for text in self.page.locator(".bubble, .markdown").all_inner_texts()]

    def notice(self, sentence: str) -> None:
        self.page.wait_for_function(
            "text => document.querySelector('#notice').textContent.includes(text)", arg=sentence
        )

    def reported(self) -> list[int]:
        """The failed requests that the browser reports by itself, which are no problems then."""
        found = [re.match(r"Failed to load resource: .* status of (\d+)", text) for text in self.problems]
        self.problems[:] = [text for text, match in zip(self.problems, found, strict=True) if not match]
        return [int(match[1]) for match in found if match]
