"""The chat page in Chromium, against a server that says what a test wrote down: answers, and what goes wrong."""

import re

import pytest


def test_an_answer_streams_in_with_its_numbers(chat, server):
    server.answer, server.hold_after = "One **two** three four.", 3
    chat.ask("Count")
    chat.page.wait_for_selector("text=One two")
    assert chat.page.get_attribute(".answer", "aria-busy") == "true"
    assert chat.page.get_attribute("#send", "aria-label") == "Stop"
    assert chat.page.inner_text("#announcer") == ""  # not each token
    server.go.set()
    chat.answered()
    assert chat.page.inner_text(".answer .markdown") == "One two three four."
    assert chat.page.inner_text(".answer strong") == "two"
    numbers = r"812 tokens in \(768 cached\) · 6 out · [\d.,]+ tokens/s · first token after [\d.]+ s"
    assert re.fullmatch(numbers, chat.page.inner_text(".stats"))
    assert chat.page.inner_text("#context") == "Context 818 of 8,192 tokens (10 %)"
    assert chat.page.inner_text("#announcer") == "Answer: One two three four."
    assert chat.page.title() == "Count - Warpbus"
    assert server.requests == [
        {
            "model": "glm-4-9b-chat",
            "messages": [{"role": "user", "content": "Count"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_a_conversation_goes_on_and_survives_a_reload(chat, server):
    chat.say("First")
    server.answer = "Second answer."
    chat.say("Second")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["First", "Hello.", "Second"]
    chat.page.fill("#question", "a draft")
    chat.page.reload()
    chat.ready()
    assert chat.texts() == ["First", "Hello.", "Second", "Second answer."]
    assert chat.page.input_value("#question") == "a draft"
    assert chat.page.inner_text("#conversations [aria-current]") == "First"


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_keeps_what_has_come(chat, server, way):
    server.answer, server.hold_after = "It was a dark and stormy night.", 4
    chat.ask("Tell me a story")
    chat.page.wait_for_selector("text=It was a dark an")
    chat.page.click("#send") if way == "button" else chat.page.keyboard.press("Escape")
    chat.answered()
    assert chat.texts()[-1] == "It was a dark an"
    assert "Stopped." in chat.page.inner_text(".ending")
    chat.page.wait_for_timeout(50)
    assert server.left == 1
    server.hold_after, server.answer = None, "d stormy night."
    chat.page.click("text=Continue")
    chat.answered()
    assert chat.texts()[-1] == "It was a dark and stormy night."


def test_stop_before_the_first_token_gives_the_question_back(chat, server):
    server.hold_after = 0
    chat.ask("Never mind")
    chat.page.keyboard.press("Escape")
    chat.notice("This question has no answer yet.")
    assert chat.texts() == ["Never mind"]
    server.hold_after = None
    chat.page.click("text=Try again")
    chat.answered()
    assert chat.texts() == ["Never mind", "Hello."]


def test_regenerating_keeps_both_versions(chat, server):
    chat.say("Greet me")
    server.answer = "Good evening."
    chat.page.click("[aria-label=Regenerate]")
    chat.page.wait_for_selector("text=2/2")
    assert chat.texts() == ["Greet me", "Good evening."]
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "Greet me"}]
    chat.page.click("[aria-label='Previous version']")
    assert chat.texts() == ["Greet me", "Hello."]
    chat.say("And again")
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Greet me", "Hello.", "And again"]


def test_the_last_question_can_be_edited(chat, server):
    chat.say("First")
    chat.say("Secnd")
    chat.page.keyboard.press("ArrowUp")
    assert chat.page.input_value("#question") == "Secnd"
    assert "Editing" in chat.page.inner_text("#hint")
    chat.page.keyboard.press("Escape")
    assert chat.page.input_value("#question") == ""
    chat.page.locator("[aria-label=Edit]").last.click()
    server.answer = "Better."
    chat.ask("Second")
    chat.answered()
    assert chat.texts() == ["First", "Hello.", "Second", "Better."]


def test_any_question_can_be_edited_and_both_branches_stay(chat, server):
    chat.say("First")
    server.answer = "Second answer."
    chat.say("Second")
    server.answer = "Another."
    chat.page.locator("[aria-label=Edit]").first.click()
    chat.ask("First, better")
    chat.answered("Another.")
    assert chat.texts() == ["First, better", "Another."]
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["First, better"]
    chat.page.reload()
    chat.ready()
    chat.page.click(".question [aria-label='Previous version']")
    assert chat.texts() == ["First", "Hello.", "Second", "Second answer."]
    assert chat.page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Next version"
    server.answer = "Hello again."
    chat.page.locator("[aria-label=Regenerate]").first.click()  # the first of two answers
    chat.answered("Hello again.")
    assert chat.texts() == ["First", "Hello again."]
    chat.page.click(".answer [aria-label='Previous version']")
    assert chat.texts() == ["First", "Hello.", "Second", "Second answer."]
    chat.page.click(".question [aria-label='Next version']")
    assert chat.texts() == ["First, better", "Another."]


def test_an_answer_that_never_began_leaves_its_branch(chat, server):
    chat.say("First")
    chat.say("Second")
    server.failures = [(500, {"message": "no"}, {})]
    chat.page.locator("[aria-label=Regenerate]").first.click()
    chat.notice("The server answered: no")
    assert chat.texts() == ["First", "Hello.", "Second", "Hello."]
    assert chat.reported() == [500]


def test_a_truncated_answer_is_continued(chat, server):
    server.answer, server.finish = "Half of", "length"
    chat.say("Write")
    assert "The answer reached its limit of tokens." in chat.page.inner_text(".ending")
    server.answer, server.finish = " the whole.", "stop"
    chat.page.click("text=Continue")
    chat.page.wait_for_selector(".ending", state="detached")
    chat.answered()
    assert chat.texts() == ["Write", "Half of the whole."]
    asked = server.requests[-1]["messages"]
    assert asked == [{"role": "user", "content": "Write"}, {"role": "assistant", "content": "Half of"}]
    assert server.requests[-1]["continue_final_message"] is True
    assert server.requests[-1]["add_generation_prompt"] is False
    assert re.match("812 tokens in .* 5 out", chat.page.inner_text(".stats"))  # 2 and 3


def test_message_and_code_are_copied(chat, server):
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    server.answer = "Do *this*:\n\n```python\nprint(1)\n```"
    chat.say("How?")
    chat.page.click("[aria-label='Copy code']")
    chat.page.wait_for_selector("[aria-label=Copied]")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
    chat.page.click(".answer > .foot [aria-label=Copy]")
    chat.page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('Do')")
    assert chat.page.evaluate("navigator.clipboard.readText()") == server.answer


def test_enter_belongs_to_the_input_method_while_it_composes(chat, server):
    chat.page.fill("#question", "ni hao")
    for event in ("{key: 'Enter', isComposing: true, bubbles: true}", "{key: 'Enter', keyCode: 229, bubbles: true}"):
        chat.page.evaluate(f"document.querySelector('#question').dispatchEvent(new KeyboardEvent('keydown', {event}))")
    chat.page.keyboard.press("Shift+Enter")
    assert chat.page.input_value("#question") == "ni hao\n"
    assert server.requests == []


def test_the_page_follows_only_a_reader_at_the_end(chat, server):
    server.answer, server.hold_after, server.pieces = "line\n\n" * 120, 10, 60
    chat.ask("Long")
    chat.page.wait_for_function("() => document.querySelectorAll('.answer p').length >= 90")
    left = "s.scrollHeight - s.scrollTop - s.clientHeight"
    at = f"() => {{ const s = document.querySelector('#scroll'); return {left}; }}"
    chat.page.wait_for_function(f"() => ({at})() < 4")
    chat.page.evaluate("document.querySelector('#scroll').scrollTop = 100")
    chat.page.wait_for_selector("#bottom:visible")
    server.go.set()
    chat.answered()
    assert chat.page.evaluate("document.querySelector('#scroll').scrollTop") == 100
    chat.page.click("#bottom")
    assert chat.page.evaluate(at) < 4


def test_two_conversations_are_answered_at_once(chat, server):
    server.answer, server.hold_after = "slow and steady", 2
    chat.ask("One")
    chat.page.wait_for_selector("text=slow an")
    chat.page.click("#new")
    assert chat.texts() == []
    assert chat.page.locator("#conversations .running").count() == 1
    chat.ask("Two")
    chat.page.wait_for_selector("text=slow an")
    server.go.set()
    chat.answered()
    chat.page.click("#conversations >> text=One")
    chat.answered()
    assert chat.texts() == ["One", "slow and steady"]


# What goes wrong


def test_a_server_with_keys_opens_the_settings(chat, server):
    server.key = "a secret"
    chat.ask("Hello?")
    chat.page.wait_for_selector("#settings-problem >> text=The server asks for an API key.")
    assert chat.page.evaluate("document.activeElement.id") == "key"
    chat.page.keyboard.type("wrong")
    chat.page.keyboard.press("Escape")
    chat.page.wait_for_selector("#settings-problem >> text=The server does not accept this API key.")
    chat.page.fill("#key", "a secret")
    chat.page.keyboard.press("Enter")
    chat.answered()
    assert chat.texts() == ["Hello?", "Hello."]
    stored = "[sessionStorage.getItem('warpbus.key'), localStorage.getItem('warpbus.key')]"
    assert chat.page.evaluate(stored) == ["a secret", None]
    chat.page.click("#settings-open")
    chat.page.check("#remember")
    assert chat.page.evaluate(stored) == [None, "a secret"]
    chat.problems.clear()  # the browser reports each 401 on its own


def test_a_busy_server_is_asked_again_when_it_said(timed, server):
    chat = timed
    server.failures = [(429, {"message": "queue full", "code": "queue_full"}, {"Retry-After": "30"})]
    chat.ask("Now?")
    chat.notice("The server is busy. Next attempt in 30 s.")
    chat.page.clock.run_for(1000)
    chat.notice("The server is busy. Next attempt in 29 s.")
    assert len(server.requests) == 1
    chat.page.clock.run_for(29_500)
    chat.page.clock.resume()
    chat.answered()
    assert chat.texts() == ["Now?", "Hello."]
    assert chat.reported() == [429]


def test_a_restarting_engine_is_waited_for(timed, server):
    chat = timed
    server.healthy = False
    server.failures = [(503, {"message": "starting", "code": "engine_unavailable"}, {"Retry-After": "5"})]
    chat.ask("Are you there?")
    chat.notice("The model is not ready: its engine is starting.")
    with chat.page.expect_response("**/health"):
        chat.page.clock.run_for(2600)
    assert len(server.requests) == 1
    server.healthy = True
    chat.page.clock.run_for(2600)
    chat.page.clock.resume()
    chat.answered()
    assert chat.texts() == ["Are you there?", "Hello."]
    assert set(chat.reported()) == {503}


def test_a_server_that_is_away_is_asked_again(chat):
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.ask("Anybody?")
    chat.notice("The server cannot be reached.")
    chat.page.unroute("**/v1/**")
    chat.page.click("text=Try again")
    chat.answered()
    assert chat.texts() == ["Anybody?", "Hello."]
    chat.problems.clear()  # ERR_FAILED, of the browser's own accord


def test_a_refusal_is_reported_and_nothing_is_lost(chat, server):
    for status, error, sentence in [
        (400, {"message": "x", "code": "context_length_exceeded"}, "longer than the model can read"),
        (413, {"message": "x"}, "longer than the model can read"),
        (400, {"message": "<b>temperature</b> is odd"}, "The server answered: <b>temperature</b> is odd"),
        (500, {}, "The server answered: HTTP 500"),
        (503, {"message": "it sleeps", "code": "asleep"}, "The server answered: it sleeps"),
    ]:
        server.failures = [(status, error, {})]
        chat.ask("A question")
        chat.notice(sentence)
        assert chat.texts() == ["A question"]
        assert chat.reported() == [status]
        chat.page.click("#new")
        assert chat.page.inner_text("#notice") == ""


def test_a_stream_that_breaks_keeps_its_text(chat, server):
    server.answer, server.stream_error = "So far", {"message": "a GPU died", "type": "server_error"}
    chat.ask("Go")
    chat.notice("The answer broke off: a GPU died")
    assert chat.texts() == ["Go", "So far"]
    assert "The answer was interrupted." in chat.page.inner_text(".ending")
    server.answer, server.stream_error = " so good", None
    chat.page.click("text=Continue")
    chat.answered("So far so good")
    assert chat.texts() == ["Go", "So far so good"]


def test_an_engine_that_dies_amid_an_answer_is_reported_until_it_is_back(timed, server):
    chat = timed
    server.answer, server.healthy = "So far", False
    server.stream_error = {"message": "the engine died", "type": "service_unavailable"}
    chat.ask("Go")
    chat.notice("The answer broke off: the engine died")
    server.healthy = True
    with chat.page.expect_response("**/health"):
        chat.page.clock.run_for(2600)
    chat.page.wait_for_selector("#toast >> text=The server is back.")
    assert chat.page.inner_text("#notice") == ""
    assert chat.texts() == ["Go", "So far"]
