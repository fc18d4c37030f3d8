"""The pool's page in Chromium: what it shows of a pool that changes, and how it is read, by whomever."""

import re
import time

import pytest
from fake_pool import GB, FakePool, event, fake_pool, gpu, lease, remembered
from test_e2e_chat_settings import CONTRAST, UNNAMED

from warpbus.server.options import ServerOptions

DESKTOP = {"locale": "en-US", "reduced_motion": "reduce", "viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
ROWS = "(id) => [...document.querySelectorAll(`#${id} tbody tr`)].map((row) => [...row.cells].map((c) => c.innerText))"


class Page:
    """A browser of its own on the pool's page; `problems` is what its console complained of."""

    def __init__(self, chromium, pool, **context):
        self.pool = pool
        self.page = chromium.new_context(**{**DESKTOP, **context}).new_page()
        self.page.set_default_timeout(60_000)
        self.problems = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(pool.url)

    def shows(self, selector, text):
        self.page.wait_for_function(
            "([s, text]) => document.querySelector(s)?.textContent.includes(text)", arg=[selector, text]
        )

    def rows(self, name):
        return self.page.evaluate(ROWS, name)

    def close(self):
        self.page.context.close()


@pytest.fixture
def pool():
    with fake_pool(FakePool()) as fake:
        yield fake


@pytest.fixture
def shown(chromium, pool):
    page = Page(chromium, pool)
    page.shows("#live-text", "live")
    yield page
    assert page.problems == []
    page.close()


def test_the_tables_hold_what_the_pool_says(shown, pool):
    pool.leases[0].update(priority=3, idle=65.0, since=time.time() - 7300)
    pool.leases[1].update(state="moving", target="mill/1", reason="mill/0 is drained")
    waiting = {"id": "f" * 32, "tenant": "carol", "memory": 70 * GB, "share": 1.0, "priority": 2, "waited": 130.0}
    pool.queue = [{**waiting, "why": "needs 70.00 GB; mill/1 has 40.00 GB"}]
    pool.events.append(event(5, "not moved", tenant="bob", lease="02", source="mill/0", text="stayed on mill/0: slow"))
    shown.shows("#leases", "mill/1")
    alice, bob = shown.rows("leases")
    assert [cell.replace("\n", " ") for cell in alice] == [
        "alice019f86d0",
        "mill/0",
        "18 GB of 24 GB",
        "50 %",
        "3",
        "placed",
        "2 hr 1 min",
        "1 min 5 sec",
        "most of mill/0 was free",
    ]
    assert (bob[1], bob[5], bob[8]) == ("mill/0 → mill/1", "moving", "mill/0 is drained")
    assert shown.rows("queue") == [
        ["1", "carolffffffff", "70 GB", "100 %", "2", "2 min 10 sec", "needs 70.00 GB; mill/1 has 40.00 GB"]
    ]
    trouble, joined = shown.rows("events")
    assert trouble[1:4] == ["not moved", "bob02", "mill/0\nstayed on mill/0: slow"]
    assert joined[1] == "joined"
    tiles = shown.page.eval_on_selector_all("#summary > div", "(all) => all.map((e) => e.innerText.split('\\n'))")
    assert tiles[:6] == [
        ["GPUs open", "2 of 2"],
        ["Memory reserved", "65 %", "104 GB of 160 GB"],  # the move has reserved room on both sides
        ["Memory in use", "18 %", "29 GB"],
        ["Compute leased", "50 %"],
        ["Leases", "2"],
        ["Waiting", "1"],
    ]


def test_gpus_show_memory_share_and_state(shown, pool):
    pool.gpus["forge/0"] = {**gpu("forge/0", "NVIDIA H200", 141 * GB), "state": "lost", "free": 0}
    pool.gpus["mill/1"]["state"] = "draining"
    shown.shows("#gpus", "forge/0")
    cards = shown.page.locator("article")
    assert cards.evaluate_all("(all) => all.map((a) => a.querySelector('.badge').textContent)") == [
        "open",
        "draining",
        "lost",
    ]
    bars = cards.first.locator("[role=img]").evaluate_all("(all) => all.map((e) => e.getAttribute('aria-label'))")
    assert bars == [
        "Memory of mill/0: 29 GB in use, 64 GB reserved, 16 GB free of 80 GB",
        "Compute of mill/0: 75 % leased",
    ]
    widths = "(all) => all.map((e) => [e.style.width, e.firstChild.style.width, e.title])"
    assert cards.first.locator(".memory .piece").evaluate_all(widths) == [
        ["30%", "75%", "alice · 019f86d0"],
        ["50%", "27.5%", "bob · 029f86d0"],
    ]
    shown.shows("#announcer", "")  # it was never there, so it is no loss
    pool.gpus["mill/1"]["state"] = "lost"
    shown.shows("#announcer", "GPU mill/1 is lost")


def test_an_oversubscribed_gpu_shows_which_leases_are_in_host_memory(shown, pool):
    out = {"state": "swapped out", "since": time.time(), "bytes": 11 * GB, "waits": None, "swaps": 1}
    out |= {"why": "it was idle, and another lease has work on mill/0", "swap_seconds": 1.0, "last_wait": None}
    pool.gpus["mill/0"].update(oversubscribe=2.0, promised=160 * GB, free=160 * GB, resident=24 * GB, swapped=11 * GB)
    pool.leases[0]["residency"] = {**out, "state": "resident", "bytes": 0, "why": "", "swaps": 0}
    pool.leases[1]["residency"] = out
    shown.shows("#gpus", "oversubscribed 2x: leases of 24 GB are in 80 GB of GPU memory, 11 GB in host memory")
    card = shown.page.locator("article").first
    assert card.locator(".memory .free").inner_text() == "96 GB free of 160 GB"
    pieces = "(all) => all.map((e) => [e.style.width, e.classList.contains('out')])"
    assert card.locator(".memory .piece").evaluate_all(pieces) == [["15%", False], ["25%", True]]
    assert card.locator(".compute .piece").evaluate_all(pieces) == [["25%", False], ["12.5%", True]]
    rows = shown.rows("leases")
    assert [row[5] for row in rows] == ["placed", "in host memory"]
    assert rows[1][8] == out["why"]


def test_a_migration_is_a_mark_with_its_pause_and_bytes(shown, pool):
    assert shown.page.locator(".mark").count() == 0
    pool.moved(1, "mill/1", seconds=4.2, pause=0.018, copied=11 * GB)
    shown.page.wait_for_selector(".mark", state="attached")
    marks = shown.page.locator(".mark")
    of = "m.closest('article').querySelector('h3').textContent"
    assert marks.evaluate_all(f"(all) => all.map((m) => [{of}, m.classList.contains('leaves')])") == [
        ["mill/0", True],
        ["mill/1", False],
    ]
    sentence = "bob moved from mill/0 to mill/1: pause 18 ms · took 4.2 sec · 11 GB copied"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d: {re.escape(sentence)}", marks.first.get_attribute("aria-label"))
    assert shown.page.inner_text("#announcer") == sentence
    marks.last.locator("span").hover()
    tip = shown.page.locator("#tip p").all_inner_texts()
    assert tip[1:3] == ["mill/0 → mill/1", "pause 18 ms · took 4.2 sec · 11 GB copied"]
    assert shown.rows("events")[0][3:] == ["mill/0 → mill/1", "pause 18 ms · took 4.2 sec · 11 GB copied"]
    assert "longest pause 18 ms" in shown.page.inner_text("#summary")
    # Another one at the same place is recognized by the same mark.
    pool.moved(0, "mill/1", seconds=1.0, pause=0.009, copied=GB)
    shown.page.wait_for_selector(".mark.several", state="attached")
    assert marks.count() == 2
    assert marks.last.get_attribute("aria-label").count(" moved from mill/0 to mill/1: ") == 2
    # It stays at its place and keeps the focus while the page goes on.
    marks.last.focus()
    before = shown.page.evaluate("() => document.querySelector('path.line').getAttribute('d').length")
    shown.page.wait_for_function("n => document.querySelector('path.line').getAttribute('d').length !== n", arg=before)
    assert marks.last.evaluate("(m) => m === document.activeElement")
    assert shown.page.is_visible("#tip")
    shown.page.keyboard.press("Escape")
    assert not shown.page.is_visible("#tip")


def test_the_last_hour_is_there_from_the_first_moment(chromium):
    fake = FakePool()
    moves = [event(1800, "moved", lease="02", tenant="bob", source="mill/1", target="mill/0", seconds=1.0, bytes=GB)]
    history = remembered([("mill/0", 64 * GB, 0.7), ("mill/1", 20 * GB, 0.9)], moves)
    with fake_pool(fake, history=history):
        shown = Page(chromium, fake)
        shown.page.wait_for_selector("path.line[d]", state="attached")
        points = "() => document.querySelector('path.line').getAttribute('d').split('L').length"
        shown.page.wait_for_function(f"() => ({points})() > 700")
        mark = shown.page.locator(".mark").first
        centre = "(m) => parseFloat(m.style.left) / m.parentElement.parentElement.clientWidth"
        assert 0.45 < mark.evaluate(centre) < 0.55
        shown.page.click("text=10 min")
        shown.page.wait_for_function(f"() => ({points})() < 130")
        assert shown.page.locator(".mark").count() == 0
        shown.page.reload()
        shown.shows("#live-text", "live")
        assert shown.page.get_attribute("text=10 min", "aria-checked") == "true"
        # While the pool is silent the page says so and keeps what it has; afterwards it goes on by itself.
        fake.failure = "warpbus://mill:7700 does not answer: start it with warpbus pool serve"
        shown.shows("#notice", "The pool does not answer: warpbus://mill:7700 does not answer")
        assert re.fullmatch(r"as of .+ ago", shown.page.inner_text("#live-text"))
        assert shown.page.locator("article").count() == 2
        fake.failure = None
        shown.shows("#live-text", "live")
        assert shown.page.inner_text("#notice") == ""
        assert [text for text in shown.problems if "503" not in text] == []
        shown.close()


def test_names_are_text_whatever_is_in_them(shown, pool):
    hostile = '<img src=x onerror="document.title=1">'
    right_to_left = "\u202eevil\u2066"
    long = "x" * 300
    pool.leases = [
        lease(each, name, "mill/0", 5, 0.1, reason=f"<b>{name}</b>")
        for each, name in enumerate([hostile, right_to_left, long, "__proto__", "</script><script>alert(1)</script>"])
    ]
    pool.gpus["<i>x</i>/0"] = gpu("<i>x</i>/0", "<u>model</u>")
    pool.events.append(event(1, "<s>kind</s>", tenant=hostile, source="<i>x</i>/0", text="<a href=//x>y</a>"))
    pool.events.append(
        event(0, "moved", lease="zz", tenant=hostile, source="<i>x</i>/0", target="mill/0", seconds=1.0, bytes=5)
    )
    shown.shows("#leases", hostile)
    shown.page.wait_for_selector(".mark", state="attached")
    shown.page.locator(".mark").first.focus()
    assert shown.page.inner_text("#tip").startswith(hostile)
    assert shown.page.locator("#leases bdi").evaluate_all("(all) => all.map((e) => e.textContent)")[1] == right_to_left
    assert shown.page.locator("main :is(img, script, b, u, s, a, i:not(.dot, .sample))").count() == 0
    assert shown.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert shown.page.title() == "GPU pool - Warpbus"


def test_language_and_theme_are_switched_and_kept(shown, pool):
    pool.leases[0]["reason"] = "requested on mill, the only GPU with room: 10.00 GB and share 0.50 stay free"
    shown.shows("#leases", "the only GPU with room")
    shown.page.click("#language")
    assert shown.rows("leases")[0][8] == "指定在 mill，唯一放得下的 GPU：还剩显存 10.00 GB、算力份额 0.50"
    assert shown.page.get_attribute("html", "lang") == "zh-CN"
    assert shown.page.title() == "GPU 池 - Warpbus"
    assert shown.page.inner_text("#leases-title") == "租约"
    assert shown.rows("leases")[0][2].replace("\n", " ") == "18 GB / 24 GB"
    assert shown.page.inner_text("article .badge >> nth=0") == "可用"
    colour = "() => getComputedStyle(document.body).backgroundColor"
    light = shown.page.evaluate(colour)
    shown.page.click("#theme")
    shown.page.click("#theme")
    dark = shown.page.evaluate(colour)
    assert dark != light
    shown.page.reload()
    shown.shows("#live-text", "实时")
    assert shown.page.evaluate(colour) == dark
    assert shown.page.inner_text("th.tenant") == "租户"
    shown.page.click("#theme")
    shown.page.emulate_media(color_scheme="dark")
    assert shown.page.get_attribute("html", "data-theme") is None
    assert shown.page.evaluate(colour) == dark


def test_the_page_is_used_by_keyboard_alone(shown, pool):
    page = shown.page
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "gpus"
    page.keyboard.press("Tab")
    chart = "() => document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(chart) == "Memory of mill/0 over time"
    said = "() => document.activeElement.getAttribute('aria-valuetext')"
    assert re.fullmatch(r"\d\d:\d\d:\d\d: 29 GB in use, 64 GB reserved", page.evaluate(said))
    page.keyboard.press("Home")
    assert page.evaluate(said).endswith(": no sample")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-valuenow')") == "-3600"
    page.keyboard.press("Escape")
    assert page.evaluate(said).endswith(": 29 GB in use, 64 GB reserved")
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "filter"
    page.keyboard.type("BOB")
    assert [row[0] for row in shown.rows("leases")] == ["bob029f86d0"]
    assert page.inner_text("#leases-count") == "1 of 2"
    page.keyboard.type("x")
    assert page.inner_text("#leases .nothing") == "Nothing found."
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert [row[0][:3] for row in shown.rows("leases")] == ["bob", "ali"]
    assert page.get_attribute("#leases th.tenant", "aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert [row[0][:3] for row in shown.rows("leases")] == ["ali", "bob"]
    page.locator("[role=radio][aria-checked=true]").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.textContent") == "10 min"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(shown, pool, scheme):
    pool.gpus["mill/1"]["state"] = "draining"
    pool.leases[1].update(state="moving", target="mill/1")
    pool.events.append(event(1, "expired", tenant="bob", text="bob expired"))
    shown.shows("#events", "expired")
    shown.page.emulate_media(color_scheme=scheme)
    badges = [f".badge[data-state={state}]" for state in ("open", "draining", "moving", "expired")]
    texts = [".model", ".row .free", ".reading", "#summary .name", "#summary .more", "th.tenant", "td.reason", ".id"]
    others = ["h1", "#live-text", ".key", "[aria-checked=false]", "[aria-checked=true]", ".count", "#language"]
    contrasts = shown.page.evaluate(CONTRAST, [*badges, *texts, *others])
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}


def test_a_screen_reader_finds_its_way(shown, pool):
    pool.moved(1, "mill/1", seconds=1.0, pause=0.01, copied=GB)
    shown.page.wait_for_selector(".mark", state="attached")
    assert shown.page.evaluate(UNNAMED) == []
    sliders = shown.page.locator("svg[role=slider]").evaluate_all(
        "(all) => all.map((s) => s.getAttribute('aria-label'))"
    )
    assert sliders == [f"{what} of mill/{which} over time" for which in (0, 1) for what in ("Memory", "Utilization")]
    assert shown.page.locator("caption").all_inner_texts() == ["Leases", "Queue", "Events"]
    assert shown.page.locator("section[aria-labelledby]").count() == 4
    assert shown.page.get_attribute("#notice", "role") == "alert"
    assert shown.page.get_attribute("#announcer", "aria-live") == "polite"


def test_an_empty_pool_says_how_to_begin(shown, pool):
    pool.gpus, pool.leases, pool.events = {}, [], []
    shown.shows("main", "No GPU has joined the pool. On a machine with one: warpbus pool serve")
    assert shown.page.inner_text("#leases .nothing").startswith("Nobody holds a lease.")
    assert shown.page.inner_text("#queue .nothing") == "No request is waiting."
    pool.gpus = {"mill/0": gpu("mill/0")}
    shown.page.wait_for_selector("article")
    assert "No GPU has joined" not in shown.page.inner_text("main")


def test_a_thousand_events_come_in_portions(shown, pool):
    pool.events = [event(5000 - each, "released", tenant="t", lease=f"{each:032x}") for each in range(1000)]
    shown.shows("#events-count", "25 of 1000")
    shown.page.click("#more")
    shown.shows("#events-count", "125 of 1000")
    assert len(shown.rows("events")) == 125


def test_a_key_is_asked_for_and_kept(chromium):
    fake = FakePool()
    with fake_pool(fake, ServerOptions(host="0.0.0.0", api_keys=("a-long-key",), insecure=True)):
        shown = Page(chromium, fake)
        shown.page.wait_for_selector("#key-dialog[open]")
        assert shown.page.inner_text("#key-problem") == "The server asks for an API key."
        shown.page.keyboard.type("a-wrong-key")
        shown.page.keyboard.press("Enter")
        shown.shows("#key-problem", "The server does not accept this API key.")
        shown.page.fill("#key", "a-long-key")
        shown.page.keyboard.press("Enter")
        shown.shows("#live-text", "live")
        assert len(shown.rows("leases")) == 2
        shown.page.reload()
        shown.shows("#live-text", "live")
        assert not shown.page.is_visible("#key-dialog")
        assert [text for text in shown.problems if "401" not in text] == []
        shown.close()


def test_a_phone(chromium, pool):
    pool.queue = [
        {"id": "f" * 32, "tenant": "c" * 80, "memory": GB, "share": 1.0, "priority": 0, "waited": 1.0, "why": "w" * 200}
    ]
    shown = Page(chromium, pool, **PHONE)
    page = shown.page
    shown.shows("#live-text", "live")
    pool.moved(1, "mill/1", seconds=1.0, pause=0.01, copied=GB)
    page.wait_for_selector(".mark", state="attached")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert shown.rows("leases")[0][2].replace("\n", " ") == "18 GB of 24 GB"
    height = "e.checkVisibility() && e.getBoundingClientRect().height"
    small = f"(all) => all.map((e) => ({height})).filter((height) => height && height < 24)"
    assert page.locator("button").evaluate_all(small) == []  # WCAG 2.2, 2.5.8
    assert float(page.evaluate("() => getComputedStyle(document.querySelector('#filter')).fontSize")[:-2]) >= 16
    page.locator(".mark span").first.tap()
    assert "pause 10 ms" in page.inner_text("#tip")
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    for width in (320, 700, 900, 1100):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), width
    assert shown.problems == []
    shown.close()
