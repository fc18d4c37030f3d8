"""What the chat page keeps in the browser: conversations, also where the storage is damaged, full or closed."""

import json
from pathlib import Path

import pytest
from chat_page import Chat


def titles(chat):
    return chat.page.locator("#conversations .open").all_inner_texts()


def test_conversations_are_listed_searched_renamed_and_deleted(chat, server):
    for question in ("Alpha particles", "Beta decay"):
        chat.page.click("#new")
        chat.say(question)
    assert titles(chat) == ["Beta decay", "Alpha particles"]
    chat.page.keyboard.press("Control+k")
    chat.page.keyboard.type("hello ALPHA")
    assert titles(chat) == ["Alpha particles"]
    chat.page.fill("#search", "gamma")
    assert "Nothing found." in chat.page.inner_text("#conversations")
    chat.page.fill("#search", "")
    chat.page.click("#conversations >> text=Alpha particles")
    assert chat.texts() == ["Alpha particles", "Hello."]
    chat.page.click("[aria-label='Rename: Alpha particles']")
    chat.page.keyboard.type("Helium nuclei <b>")
    chat.page.keyboard.press("Enter")
    assert titles(chat) == ["Beta decay", "Helium nuclei <b>"]
    chat.page.click("[aria-label='Delete: Helium nuclei <b>']")
    assert titles(chat) == ["Beta decay"]
    assert chat.texts() == []
    chat.page.click("#toast >> text=Undo")
    chat.page.reload()
    chat.ready()
    assert titles(chat) == ["Beta decay", "Helium nuclei <b>"]


def test_a_new_chat_is_in_the_list_whatever_was_searched(chat):
    chat.say("Alpha")
    chat.page.fill("#search", "alpha")
    chat.page.click("#new")
    assert chat.page.input_value("#search") == ""
    chat.page.fill("#search", "nothing")
    chat.say("Beta")
    assert titles(chat) == ["Beta", "Alpha"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_one_conversation_is_exported(chat, server, tmp_path, language):
    server.answer, server.reasoning = "It is $x^2$.\n\n```js\n1\n```", "First\n\nthen"
    chat.page.set_input_files("#attach-file", {"name": "a.md", "mimeType": "", "buffer": b"```\nx\n```\n"})
    chat.page.wait_for_selector("#files .chip")
    chat.say("Square it: x/2?")
    if language == "zh":
        chat.page.click("#language")
    saved = {}
    for kind in ("markdown", "json"):
        chat.page.click("#export-open")
        with chat.page.expect_download() as download:
            chat.page.click(f"#export-{kind}")
        download.value.save_as(tmp_path / kind)
        saved[download.value.suggested_filename] = (tmp_path / kind).read_text(encoding="utf-8")
    assert list(saved) == ["Square-it-x-2.md", "Square-it-x-2.json"]
    you = {"en": "You", "zh": "你"}[language]
    assert saved["Square-it-x-2.md"] == (
        f"# Square it: x/2?\n\n## {you}\n\nSquare it: x/2?\n\na.md:\n````\n```\nx\n```\n````\n\n"
        "## glm-4-9b-chat\n\n> First\n>\n> then\n\nIt is $x^2$.\n\n```js\n1\n```\n"
    )
    [conversation] = json.loads(saved["Square-it-x-2.json"])["conversations"]
    assert conversation["messages"][1]["versions"][0]["reasoning"] == "First\n\nthen"


def test_questions_as_earlier_releases_stored_them_are_read(chat, server):
    answer = {"content": "Old answer.", "finish": "stop", "model": "m", "stats": {"prompt": 5}}
    stored = {
        "id": "old",
        "title": "Old",
        "updated": 1,
        "messages": [
            {"role": "user", "content": "Old question"},
            {"role": "assistant", "versions": [answer], "current": 0},
        ],
    }
    chat.page.evaluate("s => localStorage.setItem('warpbus.chat.old', s)", json.dumps(stored))
    chat.page.goto(f"{server.url}/#old")
    chat.page.reload()
    chat.ready()
    assert chat.texts() == ["Old question", "Old answer."]
    chat.say("Goes on")
    assert [message["content"] for message in server.requests[-1]["messages"]] == [
        "Old question",
        "Old answer.",
        "Goes on",
    ]


def test_an_export_can_be_imported(chat, server, tmp_path):
    server.answer = "**Kept** 保存"
    chat.say("Keep this")
    chat.page.click("#settings-open")
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    assert download.value.suggested_filename.startswith("warpbus-")
    file = tmp_path / "export.json"
    download.value.save_as(file)
    chat.page.click("#delete-all")
    assert titles(chat) == ["Keep this"]  # the first click only asks
    chat.page.click("text=Really delete all 1?")
    assert titles(chat) == []
    chat.page.set_input_files("#import-file", file)
    chat.page.wait_for_selector("text=1 conversations imported.")
    chat.page.keyboard.press("Escape")
    chat.page.click("#conversations >> text=Keep this")
    assert chat.texts() == ["Keep this", "Kept 保存"]


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        '{"conversations": [{"id": "../x", "messages": []}]}',
        '{"conversations": [{"id": "a", "messages": [{"role": "system", "content": "x"}]}]}',
        '{"conversations": [{"id": "a", "messages": [{"role": "assistant", "versions": [{"content": 1}]}]}]}',
        '{"conversations": [{"id": "a", "messages": [{"role": "toString", "versions": [{}]}]}]}',
        '{"conversations": [{"id": "a", "messages": '
        + '[{"role": "user", "versions": [{"content": "", "tail": ' * 5000
        + "[]"
        + '}, {"content": ""}], "current": 1}]' * 5000
        + "}]}",
    ],
)
def test_another_file_is_not_imported(chat, content, tmp_path):
    file = Path(tmp_path / "other.json")
    file.write_text(content, encoding="utf-8")
    chat.page.set_input_files("#import-file", file)
    chat.page.wait_for_selector("text=This file is no export of conversations.")
    assert titles(chat) == []


def test_damaged_storage_costs_only_what_is_damaged(chat, server):
    chat.say("Whole")
    good = chat.page.evaluate("() => localStorage.getItem(Object.keys(localStorage).find((k) => k.includes('.chat.')))")
    odd = json.loads(good) | {"id": "odd", "title": 7, "updated": "never", "extra": 1}
    stored = {
        "warpbus.chat.cut": good[:40],
        "warpbus.chat.null": "null",
        "warpbus.chat.other": good,  # the id is not its name
        "warpbus.chat.odd": json.dumps(odd),
        "warpbus.settings": '{"theme": 7, "temperature": "hot", "language": "tlh", "model": "gone"}',
        "warpbus.draft.new": '["x"',
    }
    chat.page.evaluate("s => { for (const [k, v] of Object.entries(s)) localStorage.setItem(k, v); }", stored)
    chat.page.goto(server.url)
    chat.ready()
    assert titles(chat) == ["Whole", ""]
    chat.page.wait_for_selector("text=3 saved conversations could not be read")
    assert chat.page.evaluate("() => localStorage.getItem('warpbus.chat.cut')") == good[:40]
    chat.say("Goes on")
    assert server.requests[-1]["model"] == "glm-4-9b-chat"


def test_full_storage_is_reported_and_the_chat_goes_on(chat, server):
    chat.page.evaluate(
        """() => { Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }; }"""
    )
    chat.say("More")
    chat.page.wait_for_selector("text=The browser's storage is full")
    chat.say("And more")
    assert chat.texts() == ["More", "Hello.", "And more", "Hello."]


def test_without_any_storage_the_page_works(chromium, server):
    server.reset()
    context = chromium.new_context(locale="en-US")
    context.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, "
        "{ get() { throw new DOMException('', 'SecurityError'); } });"
    )
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("text=The browser stores nothing here")
    page.fill("#question", "Anyway")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .stats")
    page.click("#settings-open")
    page.fill("#key", "kept while the page is open")
    assert problems == []
    context.close()


def test_another_tab_is_followed(chat, server):
    chat.say("Mine")
    other = chat.page.context.new_page()
    other.goto(server.url)
    other.click("#conversations >> text=Mine")
    other.fill("#question", "From the other tab")
    other.keyboard.press("Enter")
    other.wait_for_selector("article:nth-of-type(4) .stats")
    chat.page.wait_for_selector(".bubble >> text=From the other tab")
    other.click("[aria-label='Delete: Mine']")
    chat.page.wait_for_selector("#welcome:visible")
    other.close()


def test_an_answer_cut_off_by_a_reload_can_be_continued(chat, server):
    server.answer, server.hold_after = "One two three", 2
    chat.ask("Count")
    chat.page.wait_for_selector("text=One two")
    chat.page.reload()
    chat.ready()
    chat.answered("One two")
    assert "The answer was interrupted." in chat.page.inner_text(".ending")
    server.go.set()
    server.hold_after, server.answer = None, " three"
    chat.page.click("text=Continue")
    chat.answered("three")
    assert chat.texts() == ["Count", "One two three"]


def test_each_conversation_has_its_draft(chat):
    chat.say("One")
    chat.page.fill("#question", "draft of one")
    chat.page.click("#new")
    assert chat.page.input_value("#question") == ""
    chat.page.fill("#question", "draft of a new one")
    chat.page.click("#conversations >> text=One")
    assert chat.page.input_value("#question") == "draft of one"
    chat.page.keyboard.press("Control+Shift+O")
    assert chat.page.input_value("#question") == "draft of a new one"


def test_chat_is_of_use_from_its_first_visit(chromium, server):
    """The first visit of a browser in Chinese: no storage, the other language."""
    server.reset()
    chat = Chat(chromium, server, locale="zh-CN")
    assert chat.page.get_attribute("html", "lang") == "zh-CN"
    assert "对话会出现在这里" in chat.page.inner_text("#conversations")
    chat.say("床前明月光，\n下一句？")
    assert titles(chat) == ["床前明月光，"]
    assert chat.page.inner_text(".stats").startswith("输入 812 个 token（768 个已缓存） · 输出 2 个")
    assert chat.problems == []
    chat.close()
