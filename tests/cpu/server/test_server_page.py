"""The chat page's files: how they are served, that they belong together, and that the page talks to the real server."""

import re
from importlib import resources

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from warpbus.server.page import HEADERS, page_router

PAGE = resources.files("warpbus.server") / "page"
SCRIPTS = sorted(entry.name for entry in PAGE.iterdir() if entry.name.endswith(".js"))


def source(name):
    return (PAGE / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def client():
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
        ("/page/mark.svg", "image/svg+xml"),
        ("/page/vendor/markdown-it/markdown-it.esm.min.mjs", "text/javascript; charset=utf-8"),
        ("/page/vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
        ("/page/vendor/highlight.js/LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_every_file_comes_with_strict_headers(client, path, media_type):
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == media_type
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "font-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_a_file_is_sent_again_only_where_it_changed(client):
    packed = client.get("/page/page.js")
    plain = client.get("/page/page.js", headers={"accept-encoding": "identity"})
    assert packed.text == plain.text == source("page.js")
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.headers["etag"] != plain.headers["etag"]
    again = client.get("/page/page.js", headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = client.head("/page/page.js", headers={"accept-encoding": "identity"})
    assert (head.content, int(head.headers["content-length"])) == (b"", len(plain.content))


@pytest.mark.parametrize(
    "name", ["nothing.js", "../page.py", "..%2fpage.py", "%2e%2e/page.py", "/etc/passwd", "vendor"]
)
def test_nothing_else_is_served(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_has_no_script_and_no_style_of_its_own():
    """The policy would refuse them; and an address elsewhere would be a request that nobody expects."""
    page = source("index.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    linked = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert linked
    for address in linked:
        assert (PAGE / address.removeprefix("page/")).is_file(), address
    for name in [*SCRIPTS, "base.css", "page.css"]:
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source(name)), name


def test_nothing_becomes_html_but_by_the_browsers_own_elements():
    for name in SCRIPTS:
        assert not re.search(
            r"(inner|outer)HTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", source(name)
        ), name


def test_modules_import_what_exists():
    for name in SCRIPTS:
        for names, target in re.findall(r'import (.+?) from "\./([^"]+)";', source(name)):
            text = (PAGE / target).read_text(encoding="utf-8")
            for imported in re.findall(r"\w+", names) if names.startswith("{") else []:
                assert re.search(rf"export (async )?(function\*?|class|const) {re.escape(imported)}\b", text), (
                    name,
                    imported,
                )
                assert len(re.findall(rf"\b{imported}\b", source(name))) > 1, f"{name} does not use {imported}"


def test_both_languages_say_the_same_things():
    """Every string has both languages with the same values in it, and is used."""
    tables = re.findall(r"^const (en|zh) = \{$(.*?)^\};$", source("strings.js"), re.MULTILINE | re.DOTALL)
    english, chinese = (dict(re.findall(r'^  (\w+): "(.*)",$', body, re.MULTILINE)) for _, body in tables)
    assert english.keys() == chinese.keys()
    assert len(english) > 100
    for key, sentence in english.items():
        assert set(re.findall(r"\{\w+\}", sentence)) == set(re.findall(r"\{\w+\}", chinese[key])), key
    code = "".join(map(source, SCRIPTS)).replace(source("strings.js"), "")
    page = source("index.html")
    named = set(re.findall(r'data-t(?:-\w+)?="(\w+)"', page)) | set(re.findall(r'"(\w+)"', code))
    assert set(re.findall(r'data-t(?:-\w+)?="(\w+)"', page)) <= english.keys()
    assert set(re.findall(r'\bt\("(\w+)"', code)) <= english.keys()
    assert english.keys() <= named


def test_what_is_brought_along_has_its_licence():
    readme = source("vendor/README.md")
    for directory in (entry for entry in (PAGE / "vendor").iterdir() if entry.is_dir()):
        files = [entry.name for entry in directory.iterdir()]
        assert "LICENSE" in files
        code = [name for name in files if re.fullmatch(r"(?!LICENSE).*\.(m?js|css)", name)]
        assert all(f"`{directory.name}/{name}`" in readme for name in code)
        versions = re.findall(rf"{re.escape(directory.name)} (\d+\.\d+\.\d+)", readme, re.IGNORECASE)
        assert len(set(versions)) == 1
        assert all(versions[0] in (directory / name).read_text(encoding="utf-8") for name in code)


def test_every_font_that_the_formulas_ask_for_is_there():
    folder = PAGE / "vendor" / "katex"
    asked = set(re.findall(r"url\(fonts/([\w-]+\.woff2)\)", (folder / "katex.min.css").read_text(encoding="utf-8")))
    assert len(asked) == 20
    assert {entry.name for entry in (folder / "fonts").iterdir()} == asked
    assert "SIL OPEN FONT LICENSE Version 1.1" in (folder / "LICENSE.fonts").read_text(encoding="utf-8")


def test_the_page_and_the_server_understand_each_other(served, chromium):
    """A stream, a limit of tokens, and a conversation too long, through the real application."""
    page = chromium.new_page(locale="en-US")
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    served.service.script = "# Verse\n\nOne **line**."
    page.goto(served.url)
    page.wait_for_function("() => document.querySelector('#model').value === 'parrot'")
    page.fill("#question", "Say something")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .bar")
    assert page.inner_text(".answer h3") == "Verse"
    stats = r"\d+ tokens in( \(\d+ cached\))? · 23 out · [\d.,]+ tokens/s · first token after [\d.]+ s"
    assert re.fullmatch(stats, page.inner_text(".stats"))
    assert "of 2,048 tokens" in page.inner_text("#context")
    page.fill("#question", "word " * 3000)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=This conversation is longer than the model can read.")
    assert problems == []
    page.context.close()
