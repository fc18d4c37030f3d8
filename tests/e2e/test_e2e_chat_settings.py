"""Settings and surroundings of the chat page: sampling, models, language, theme, phones, keyboards, screen readers."""

import pytest
from chat_page import Chat

# A colour as Chromium computes it, over what is behind it: the contrast of WCAG 2.2, 1.4.3.
CONTRAST = """(selectors) => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    const rgb = channels(getComputedStyle(node).backgroundColor);
    return rgb[3] === 255 ? rgb : behind(node.parentElement);
  };
  const contrast = (node) => {
    const [dark, bright] = [light(channels(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  return Object.fromEntries(selectors.map((selector) => [selector, contrast(document.querySelector(selector))]));
}"""

# Controls that a screen reader could not name (Accessible Name and Description Computation, the parts used here).
UNNAMED = """() => [...document.querySelectorAll('button, input, select, textarea, a, [role=img], dialog, nav, aside')]
  .filter((node) => node.type !== 'file' && !['aria-label', 'aria-labelledby'].some((name) => node.getAttribute(name)))
  .filter((node) => !node.textContent.trim() && !node.labels?.[0]?.textContent.trim())
  .map((node) => node.outerHTML)"""


def test_settings_are_sent_and_kept(chat, server):
    chat.page.click("#settings-open")
    for name, value in {"system": "Be brief.", "temperature": "0.3", "top_p": "0.9", "max_tokens": "64"}.items():
        chat.page.fill(f"#{name}", value)
    chat.page.keyboard.press("Escape")
    chat.page.select_option("#model", "glm-poet")
    chat.page.reload()
    chat.ready()
    chat.say("Hi")
    asked = server.requests[-1]
    assert (asked["model"], asked["temperature"], asked["top_p"], asked["max_tokens"]) == ("glm-poet", 0.3, 0.9, 64)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert chat.page.locator("#context.full").count() == 1  # 814 of 512
    chat.page.click("#settings-open")
    chat.page.fill("#temperature", "7")
    chat.page.fill("#top_p", "")
    assert chat.page.evaluate("() => document.querySelector('#temperature').matches(':invalid')")
    chat.page.keyboard.press("Escape")
    chat.say("Again")
    assert server.requests[-1]["temperature"] == 0.3
    assert "top_p" not in server.requests[-1]


def test_every_sampling_parameter_is_sent_and_shows_its_default(chat, server):
    chat.page.select_option("#model", "glm-poet")
    chat.page.click("#settings-open")
    shown = {name: chat.page.get_attribute(f"#{name}", "placeholder") for name in ("temperature", "top_p", "top_k")}
    assert shown == {"temperature": "0.8", "top_p": "0.9", "top_k": "all"}
    assert not chat.page.is_visible("#thinking-choice")  # glm-poet neither thinks nor calls
    assert not chat.page.is_visible("#tools")
    chat.page.keyboard.press("Escape")
    chat.page.select_option("#model", "glm-4-9b-chat")
    chat.page.click("#settings-open")
    assert chat.page.get_attribute("#temperature", "placeholder") == "1"
    chat.page.click(".more summary")
    numbers = {
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "seed": 7,
        "min_tokens": 3,
        "thinking_token_budget": 100,
    }
    for name, value in numbers.items():
        chat.page.fill(f"#{name}", str(value))
    chat.page.fill("#stop", "END\n\nSTOP")
    chat.page.select_option("#thinking-choice", "off")
    chat.page.fill("#tools", "[{}]")
    assert "not sent" in chat.page.inner_text("#tools-note")
    chat.page.keyboard.press("Escape")
    chat.say("Hi")
    asked = server.requests[-1]
    assert {name: asked[name] for name in numbers} == numbers
    assert (asked["stop"], asked["enable_thinking"], "tools" in asked) == (["END", "STOP"], False, False)
    chat.page.select_option("#model", "glm-poet")
    chat.say("Hi")
    assert not {"enable_thinking", "thinking_token_budget"} & server.requests[-1].keys()


def test_the_welcome_page_offers_what_the_model_can_answer(chat, server):
    assert chat.page.locator(".starter").count() == 4
    assert "Python" in chat.page.inner_text("#starters")
    chat.page.select_option("#model", "glm-poet")
    assert "trained on Chinese poems" in chat.page.inner_text("#welcome-more")
    chat.page.click("text=写一首题为《春夜》的五言绝句。")
    chat.answered()
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]


def test_a_page_has_one_heading_of_level_one(chat, server):
    visible = "() => [...document.querySelectorAll('h1')].filter((h) => h.checkVisibility()).map((h) => h.textContent)"
    assert chat.page.evaluate(visible) == ["What shall we think about?"]
    server.answer = "## Two\n\n### Three\n\n# One\n\n###### Six"
    chat.say("Headings")
    assert chat.page.evaluate(visible) == ["Headings"]
    levels = "() => [...document.querySelectorAll('.markdown :is(h2, h3, h4, h5, h6)')].map((h) => h.tagName)"
    assert chat.page.evaluate(levels) == ["H3", "H4", "H3", "H4"]


def test_answers_say_whose_they_are_where_there_are_several_models(chat, server):
    chat.say("Hi")
    chat.page.select_option("#model", "glm-poet")
    chat.say("Again")
    assert chat.page.locator(".answer .by").all_inner_texts() == ["glm-4-9b-chat", "glm-poet"]
    server.models = server.models[:1]
    chat.page.reload()
    chat.ready()
    chat.page.wait_for_selector(".answer .stats")
    assert chat.page.locator(".answer .by:visible").count() == 0


def test_a_server_without_models_says_so(chat, server):
    server.models = []
    chat.page.reload()
    chat.notice("The server names no model.")
    server.models = [{"id": "late", "max_model_len": None}]
    chat.page.click("text=Try again")
    chat.ready()
    chat.say("Hi")
    assert server.requests[-1]["model"] == "late"
    assert chat.page.inner_text("#context") == ""


def test_language_and_theme_are_switched_and_kept(chat):
    chat.say("# Hi")
    chat.page.click("#language")
    assert chat.page.get_attribute("html", "lang") == "zh-CN"
    assert chat.page.get_attribute("#question", "placeholder") == "输入你的问题"
    assert chat.page.get_attribute(".answer [aria-label=重新回答]", "title") == "重新回答"
    page_colour = "() => getComputedStyle(document.body).backgroundColor"
    light = chat.page.evaluate(page_colour)
    chat.page.click("#theme")
    chat.page.click("#theme")
    dark = chat.page.evaluate(page_colour)
    assert dark != light
    chat.page.reload()
    chat.ready()
    assert chat.page.get_attribute("html", "data-theme") == "dark"
    assert chat.page.evaluate(page_colour) == dark
    assert chat.page.inner_text("#new") == "新对话"
    chat.page.click("#theme")
    assert chat.page.get_attribute("html", "data-theme") is None
    chat.page.emulate_media(color_scheme="dark")
    assert chat.page.evaluate(page_colour) == dark
    chat.page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(chat, server, scheme):
    server.answer, server.finish = (
        "```python\ndef f():  # why\n    return 'x' + 1\n```\n> quote\n\n[a](https://b.example)",
        "length",
    )
    chat.say("Show")
    chat.page.emulate_media(color_scheme=scheme)
    coloured = [f".hl-{name}" for name in ("keyword", "comment", "string", "number", "title")]
    others = [".bubble", ".markdown a", "blockquote", ".stats", ".ending", "#hint", "#model", "#conversations .open"]
    contrasts = chat.page.evaluate(
        CONTRAST, [*coloured, *others, "#conversations h2", "#search", ".code-head", "#language"]
    )
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}
    assert max(contrasts.values()) > 10
    chat.page.emulate_media(color_scheme="light")


def test_a_screen_reader_finds_its_way(chat, server):
    server.answer = "- [ ] task\n\n```js\n1\n```"
    chat.say("Name everything")
    chat.page.click("#settings-open")
    assert chat.page.evaluate(UNNAMED) == []
    chat.page.keyboard.press("Escape")
    count = "(s) => document.querySelectorAll(s).length"
    landmarks = {"main": 1, "header": 1, "nav[aria-label]": 1, "aside[aria-label]": 1, "[aria-live=polite]": 1}
    assert {selector: chat.page.evaluate(count, selector) for selector in landmarks} == landmarks
    assert chat.page.locator("article").evaluate_all("(all) => all.map((a) => a.getAttribute('aria-label'))") == [
        "You",
        "glm-4-9b-chat",
    ]
    assert chat.page.get_attribute("#notice", "role") == "alert"


def test_the_page_is_used_by_keyboard_alone(chat):
    chat.page.keyboard.press("Shift+Tab")
    chat.page.keyboard.press("/")
    assert chat.page.evaluate("() => document.activeElement.id") == "question"
    chat.say("By keys")
    chat.page.keyboard.press("Control+k")
    assert chat.page.evaluate("() => document.activeElement.id") == "search"
    chat.page.keyboard.press("Tab")
    assert chat.page.evaluate("() => document.activeElement.textContent") == "By keys"
    outline = chat.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    chat.page.keyboard.press("Tab")
    assert chat.page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Rename: By keys"
    chat.page.keyboard.press("Enter")
    chat.page.keyboard.type("Renamed")
    chat.page.keyboard.press("Enter")
    assert chat.page.inner_text("#conversations .open") == "Renamed"


def test_the_history_is_folded_away(chat):
    chat.page.click("#hide")
    assert not chat.page.is_visible("#drawer")
    assert chat.page.evaluate("() => document.activeElement.id") == "show"
    chat.page.reload()
    chat.ready()
    assert not chat.page.is_visible("#drawer")
    chat.page.click("#show")
    assert chat.page.is_visible("#drawer")


def test_a_phone(chromium, server):
    server.reset()
    server.answer = (
        "A " + "very" * 60 + " long word\n\n|" + " column |" * 12 + "\n|" + "---|" * 12 + "\n\n```\n" + "x" * 300
    )
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    chat = Chat(chromium, server, **phone)
    page = chat.page
    assert not page.is_visible("#drawer")
    page.tap("#question")
    page.keyboard.type("One")
    page.keyboard.press("Enter")
    page.keyboard.type("Two")
    assert page.input_value("#question") == "One\nTwo"  # there is no Shift to hold: Enter is a new line
    page.tap("#send")
    chat.answered()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    scroll = "() => { const s = document.querySelector('#scroll'); return s.scrollWidth <= s.clientWidth; }"
    assert page.evaluate(scroll)
    height = "e.checkVisibility() && e.getBoundingClientRect().height"
    small = f"(all) => all.map((e) => ({height})).filter((height) => height && height < 24)"
    assert page.locator("button").evaluate_all(small) == []  # WCAG 2.2, 2.5.8
    assert float(page.evaluate("() => getComputedStyle(document.querySelector('#question')).fontSize")[:-2]) >= 16
    page.tap("#show")
    assert page.is_visible("#drawer")
    assert page.evaluate("() => [document.querySelector('#stage').inert, document.activeElement.id]") == [True, "hide"]
    page.keyboard.press("Escape")
    assert not page.is_visible("#drawer")
    page.tap("#show")
    page.tap("#new")
    assert not page.is_visible("#drawer")
    assert chat.texts() == []
    page.set_viewport_size({"width": 390, "height": 400})  # the keyboard is shown
    assert page.locator("#send").bounding_box()["y"] < 400
    assert chat.problems == []
    chat.close()
