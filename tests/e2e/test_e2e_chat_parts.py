"""The parts of messages that are not Markdown: what the model thought, calls of tools and their results, files."""

import json

import pytest

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def use_tools(chat):
    chat.page.click("#settings-open")
    chat.page.fill("#tools", json.dumps(TOOLS))
    chat.page.keyboard.press("Escape")


@pytest.mark.parametrize("way", ["field", "text"])
def test_thinking_is_folded_and_apart_from_the_answer(chat, server, way):
    thought = "I **weigh** it."
    if way == "field":
        server.reasoning, server.answer = thought, "Nine."
    else:
        server.answer = f"<think>\n{thought}\n</think>\n\nNine."
    chat.say("How many?")
    assert chat.page.inner_text(".markdown.said") == "Nine."
    summary = chat.page.locator(".reasoning summary")
    assert summary.inner_text().startswith("Thought for ")
    assert not chat.page.is_visible(".reasoning .markdown")
    summary.click()
    chat.page.wait_for_selector(".reasoning strong >> text=weigh")
    if way == "field":
        assert "out (3 thinking)" in chat.page.inner_text(".stats")
    chat.say("And then?")
    answer = server.requests[-1]["messages"][1]
    assert answer == {"role": "assistant", "content": "Nine.", "reasoning_content": thought}
    chat.page.reload()
    chat.ready()
    assert chat.page.locator(".reasoning").count() == 2


def test_thinking_that_is_going_on_says_so(chat, server):
    server.answer, server.hold_after = "<think>long thoughts</think>Done.", 4
    chat.ask("Go")
    chat.page.wait_for_selector(".reasoning.running summary >> text=Thinking")
    assert chat.page.inner_text(".markdown.said") == ""
    server.go.set()
    chat.answered("Done.")
    assert chat.page.locator(".reasoning.running").count() == 0


def test_calls_are_shown_and_their_results_sent(chat, server):
    use_tools(chat)
    server.answer, server.calls = "I look.", [("weather", '{"city": "<b>杭州"}'), ("weather", "broken")]
    chat.say("Weather?")
    assert server.requests[-1]["tools"] == TOOLS
    assert chat.page.locator(".call-head").all_inner_texts() == ["Calls weather"] * 2
    assert chat.page.locator(".call pre").all_inner_texts() == ['{\n  "city": "<b>杭州"\n}', "broken"]
    chat.page.locator(".call textarea").nth(0).fill("21 °C")
    chat.page.locator(".call textarea").nth(1).fill("no such city")
    server.answer, server.calls = "It is warm.", []
    chat.page.click("text=Send results")
    chat.answered("It is warm.")
    calls = [
        {"id": "call-0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<b>杭州"}'}},
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "broken"}},
    ]
    assert server.requests[-1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-0", "content": "21 °C"},
        {"role": "tool", "tool_call_id": "call-1", "content": "no such city"},
    ]
    assert chat.page.locator(".call textarea").count() == 0
    chat.page.reload()
    chat.ready()
    assert chat.page.locator(".results summary").all_inner_texts() == ["Result of weather"] * 2
    chat.page.select_option("#model", "glm-poet")  # calls no tools
    chat.say("And now?")
    assert "tools" not in server.requests[-1]


def test_files_go_into_the_question(chat, server):
    files = [
        {"name": "notes.md", "mimeType": "text/markdown", "buffer": "a\n```\n雨\n```\n".encode()},
        {"name": "<i>.txt", "mimeType": "text/plain", "buffer": b"one"},
    ]
    chat.page.set_input_files("#attach-file", files)
    chat.page.wait_for_selector("#files .chip >> nth=1")
    assert "the text of these files below your question" in chat.page.inner_text("#files-note")
    chat.page.click("[aria-label='Remove <i>.txt']")
    assert chat.page.locator(".chip .name").all_inner_texts() == ["notes.md"]
    chat.say("Summarize")
    assert server.requests[-1]["messages"][0]["content"] == ("Summarize\n\nnotes.md:\n````\na\n```\n雨\n```\n````")
    assert chat.page.locator("#files .chip").count() == 0
    assert chat.page.inner_text(".question summary") == "notes.md · 12 characters"
    chat.page.locator("[aria-label=Edit]").click()
    assert chat.page.locator(".chip .name").all_inner_texts() == ["notes.md"]
    chat.page.keyboard.press("Escape")
    assert chat.page.locator("#files .chip").count() == 0


def test_files_stay_with_the_conversation_that_they_were_chosen_for(chat):
    chat.say("One")
    chat.page.set_input_files("#attach-file", {"name": "a.txt", "mimeType": "", "buffer": b"a"})
    chat.page.wait_for_selector("#files .chip")
    chat.page.click("#new")
    assert chat.page.locator("#files .chip").count() == 0
    chat.page.click("#conversations >> text=One")
    assert chat.page.locator("#files .chip").count() == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x89PNG\r\n\x1a\n", "x is not a text file in UTF-8."),
        (b"a\0b", "x is not a text file in UTF-8."),
        (b"a" * 200_001, "x is larger than 200 kB"),
    ],
    ids=["binary", "nul", "large"],
)
def test_other_files_are_refused(chat, content, sentence):
    chat.page.set_input_files("#attach-file", {"name": "x", "mimeType": "text/plain", "buffer": content})
    chat.page.wait_for_selector(f"#toast >> text={sentence}")
    assert chat.page.locator("#files .chip").count() == 0
    assert chat.page.is_disabled("#send")


def test_a_file_is_dropped_and_sent_alone(chat, server):
    chat.page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(['dropped'], 'd.txt'));
          const event = new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true });
          document.querySelector('#scroll').dispatchEvent(event);
        }"""
    )
    chat.page.wait_for_selector("#files .chip")
    chat.page.click("#send")
    chat.answered()
    assert server.requests[-1]["messages"][0]["content"] == "d.txt:\n```\ndropped\n```"
    assert chat.page.title() == "d.txt - Warpbus"
