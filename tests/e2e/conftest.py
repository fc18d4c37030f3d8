"""The chat page on a server that says what a test wrote down."""

import pytest
from chat_page import NO_PROBLEMS, Chat
from fake_chat_server import fake_chat_server


@pytest.fixture(scope="module")
def server():
    with fake_chat_server() as fake:
        yield fake


@pytest.fixture(scope="module")
def browser(chromium, server):
    chat = Chat(chromium, server)
    yield chat
    chat.close()


@pytest.fixture
def chat(browser, server):
    server.reset()
    browser.fresh()
    yield browser
    assert browser.problems == NO_PROBLEMS


@pytest.fixture
def timed(chromium, server):
    """A page whose time the test moves."""
    server.reset()
    chat = Chat(chromium, server)
    chat.page.clock.install()
    yield chat
    assert chat.problems == NO_PROBLEMS
    chat.close()
