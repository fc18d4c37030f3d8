"""The pool's page: its files, what the server says of a pool, what it remembers, and who may look."""

import asyncio
import re
import time
from importlib import resources

import pytest
from starlette.testclient import TestClient

from warpbus.errors import DeviceError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.daemon.residency import FULL
from warpbus.pool.quota import Quota
from warpbus.server.options import ServerOptions
from warpbus.server.page import HEADERS
from warpbus.server.pool_page import SHARED, History, Pool, create_pool_app

ROOM = resources.files("warpbus.server")
PAGE = ROOM / "pool_page"
SCRIPTS = sorted(entry.name for entry in PAGE.iterdir() if entry.name.endswith(".js"))


def source(name):
    return ((ROOM / "page" if name in SHARED else PAGE) / name).read_text(encoding="utf-8")


def status_at(now, *, used=10, events=()):
    gpu = {"name": "mill/0", "used": used, "measured_memory": used - 1, "utilization": 0.5}
    return {"now": now, "gpus": [gpu], "leases": [], "queue": [], "events": list(events)}


def move(when, target="mill/1"):
    return {"time": when, "kind": "moved", "lease": "ab", "tenant": "t", "source": "mill/0", "target": target}


def client_of(status, options=None, **history):
    return TestClient(create_pool_app(status, options or ServerOptions(), History(**history)), "http://localhost")


async def working():
    return status_at(time.time())


def test_every_file_comes_with_strict_headers():
    client = client_of(working)
    page = client.get("/")
    assert page.status_code == 200
    linked = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert {"page/base.css", "page/pool.css", "page/pool.js", "page/mark.svg", "page/first.js"} <= set(linked)
    for name in ["", *(f"page/{name}" for name in [*SHARED, *SCRIPTS, "pool.css"]), *linked]:
        answer = client.get(f"/{name}")
        assert answer.status_code == 200, name
        assert {each: answer.headers[each] for each in HEADERS} == HEADERS
    for name in ("page.js", "chat.js", "vendor/README.md", "../pool_page.py", "nothing.js"):
        assert client.get(f"/page/{name}").status_code == 404, name


def test_the_page_has_no_script_and_no_style_of_its_own():
    page = source("index.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    for name in [*SCRIPTS, "pool.css"]:
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source(name)), name


def test_nothing_becomes_html():
    for name in SCRIPTS:
        forbidden = r"(inner|outer)HTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|setHTML"
        assert not re.search(forbidden, source(name)), name


def test_modules_import_what_exists():
    for name in SCRIPTS:
        for names, target in re.findall(r'import (.+?) from "\./([^"]+)";', source(name)):
            for imported in re.findall(r"[\w$]+", names):
                exported = rf"export (async )?(function\*?|class|const) {re.escape(imported)}(?!\w)"
                assert re.search(exported, source(target)), (name, imported)
                assert source(name).count(imported) > 1, f"{name} does not use {imported}"


def test_both_languages_say_the_same_things():
    tables = re.findall(r"^const (en|zh) = \{$(.*?)^\};$", source("strings.js"), re.MULTILINE | re.DOTALL)
    english, chinese = (dict(re.findall(r'^  (\w+): "(.*)",$', body, re.MULTILINE)) for _, body in tables)
    assert english.keys() == chinese.keys()
    assert len(english) > 80
    for key, sentence in english.items():
        assert set(re.findall(r"\{\w+\}", sentence)) == set(re.findall(r"\{\w+\}", chinese[key])), key
    code = "".join(map(source, SCRIPTS)).replace(source("strings.js"), "")
    page = source("index.html")
    on_page = set(re.findall(r'data-t(?:-\w+)?="(\w+)"', page))
    assert on_page <= english.keys()
    assert set(re.findall(r'\bt\("(\w+)"', code)) <= english.keys()
    # States are named by what the pool calls them.
    named = on_page | set(re.findall(r'"(\w+)"', code))
    assert english.keys() <= named


def broker_reasons():
    """What a broker and the plan of swaps say, as they say it."""
    gigabyte = 10**9
    broker = Broker()
    links = (("a/2",), (), ("a/0",))
    broker.join("a", [PoolGpu(f"a/{n}", "a", n, "H200", 80 * gigabyte, links[n]) for n in range(3)], 0)
    first = broker.request("ann", Quota(70 * gigabyte, 0.5), on="a/0", now=0)
    near = [broker.request("ann", Quota(gigabyte, share), near=first.id, now=0) for share in (0.9, 0.1)]
    broker.request("ann", Quota(75 * gigabyte, 0.5), now=0)
    for memory in (76, 5):  # the first waits, and a GPU is kept for it
        broker.request("ann", Quota(memory * gigabyte, 0.6), now=0)
    waiting = [each["why"] for each in broker.status(0)["queue"]]
    reported = [first.reason, *(lease.reason for lease in near), *waiting, *(f"waits: {why}" for why in waiting)]
    return [*reported, "stayed on a/0: moves from a/0 to a/1", "moved from a/0", FULL]


def test_reasons_of_the_pool_are_known_sentences():
    listed = re.findall(r'\[\s*/(\^.+\$)/,\s*"(\w+)",?\s*\]', source("reasons.js"))
    patterns = [(re.compile(pattern.replace("(?<", "(?P<")), key) for pattern, key in listed]
    assert len(patterns) == source("reasons.js").count("/^")
    tables = re.findall(r"^const (en|zh) = \{$(.*?)^\};$", source("strings.js"), re.MULTILINE | re.DOTALL)
    english = dict(re.findall(r'^  (\w+): "(.*)",$', tables[0][1], re.MULTILINE))

    def said(text):
        for pattern, key in patterns:
            if found := pattern.search(text):
                return english[key].format(**{name: said(part) for name, part in found.groupdict().items()})
        return text

    reasons = broker_reasons()
    assert len(reasons) >= 8
    assert [text for text in reasons if not any(pattern.search(text) for pattern, _ in patterns)] == []
    assert list(map(said, reasons)) == reasons


def test_the_status_is_the_pools_and_is_asked_for_once():
    asked = []

    async def status():
        asked.append(1)
        return status_at(1000.0, used=len(asked))

    client = client_of(status)  # without its lifespan: nothing samples beside the requests
    answers = [client.get("/api/status") for _ in range(5)]
    assert [answer.json() for answer in answers] == [status_at(1000.0, used=1)] * 5
    assert len(asked) == 1
    assert answers[0].headers["cache-control"] == "no-store"


def test_a_pool_that_does_not_answer_is_an_error_of_one_line():
    async def silent():
        raise DeviceError("warpbus://mill:7700 does not answer: start it with warpbus pool serve")

    answer = client_of(silent).get("/api/status")
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["message"].startswith("warpbus://mill:7700 does not answer")
    assert (error["type"], error["code"]) == ("service_unavailable", "pool_unavailable")


def test_samples_are_taken_while_it_runs_with_gaps_where_the_pool_is_silent():
    states = iter([True, False, True, True])

    async def status():
        if next(states, True):
            return status_at(time.time())
        raise DeviceError("silent")

    with client_of(status, seconds=0.6) as client:
        deadline = time.monotonic() + 90
        while len(found := client.get("/api/history").json()["samples"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(found) >= 2
    assert found[0]["gpus"] == {"mill/0": [10, 9, 0.5]}
    assert found[1]["time"] - found[0]["time"] > 1.0  # the one between was missed


def test_what_is_remembered_is_bounded():
    history = History(seconds=5, kept=60)
    for second in range(0, 600, 5):
        history.add(status_at(float(second), events=[move(float(each)) for each in range(0, second, 50)]))
    found = history.as_json()
    assert [sample["time"] for sample in found["samples"]] == [float(each) for each in range(540, 600, 5)]
    assert [each["time"] for each in found["moves"]] == [550.0]
    # However many moves a pool reports, no more are kept than a page can show.
    history.add(status_at(600.0, events=[move(600.0, f"mill/{each}") for each in range(2000)]))
    assert len(history.as_json()["moves"]) == 500


def test_another_clock_begins_another_history():
    history = History()
    history.add(status_at(5000.0, events=[move(4990.0)]))
    history.add(status_at(100.0))
    assert [sample["time"] for sample in history.as_json()["samples"]] == [100.0]
    assert history.as_json()["moves"] == []


def test_other_events_are_no_moves():
    history = History()
    placed = {**move(99.0), "kind": "placed"}
    history.add(status_at(100.0, events=[placed, move(98.0), move(98.0)]))
    history.add(status_at(105.0, events=[placed, move(98.0)]))
    assert [each["time"] for each in history.as_json()["moves"]] == [98.0]


def test_beyond_this_machine_a_key_is_needed_for_all_but_the_pages_files():
    options = ServerOptions(host="0.0.0.0", api_keys=("a-long-key",), insecure=True)
    client = client_of(working, options)
    assert client.get("/").status_code == 200
    assert client.get("/page/pool.js").status_code == 200
    for path in ("/api/status", "/api/history", "/openapi.json", "/metrics"):
        assert client.get(path).status_code == 401, path
    allowed = {"Authorization": "Bearer a-long-key"}
    assert client.get("/api/status", headers=allowed).status_code == 200
    assert client.get("/api/history", headers=allowed).json()["seconds"] == 5


@pytest.mark.parametrize(("path", "headers"), [("/api/status", {"host": "evil.example"}), ("/", {"host": "a.b:80"})])
def test_names_of_other_machines_are_refused_on_loopback(path, headers):
    assert client_of(working).get(path, headers=headers).status_code == 403


def test_there_is_nothing_to_change():
    app = create_pool_app(working, ServerOptions())
    methods = {method for route in app.routes for method in getattr(route, "methods", None) or ()}
    assert methods <= {"GET", "HEAD"}


def test_readers_at_once_ask_once():
    asked = []

    async def slow():
        asked.append(1)
        await asyncio.sleep(0.05)
        return status_at(1.0)

    async def many():
        pool = Pool(slow, History())
        await asyncio.gather(*(pool.status() for _ in range(20)))

    asyncio.run(many())
    assert len(asked) == 1
