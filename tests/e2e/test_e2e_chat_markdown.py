"""What the chat page makes of a model's Markdown, in Chromium: elements of a short list, and nothing that runs."""

import pytest
from fake_chat_server import fake_chat_server

ALLOWED = {
    *("P", "BR", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "INPUT", "BLOCKQUOTE", "HR", "DIV", "SPAN", "PRE", "CODE"),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "EM", "STRONG", "S", "A"),
}
ATTRIBUTES = {"class", "href", "target", "rel", "tabindex", "type", "disabled", "aria-label", "start"}

RENDER = """async ([source, steps]) => {
  const { MarkdownView } = await import('./page/markdown.js');
  const root = document.body.appendChild(document.createElement('div'));
  const view = new MarkdownView(root, { label: 'code' });
  for (let n = 1; n <= steps; n++) view.update(source.slice(0, Math.ceil(source.length * n / steps)));
  const grown = root.textContent.length;
  view.update(source, true);
  const whole = document.createElement('div');
  new MarkdownView(whole, { label: 'code' }).update(source, true);
  const shape = (node) => node.nodeType === 3 ? node.data
    : [node.tagName, [...node.attributes].map((a) => `${a.name}=${a.value}`), [...node.childNodes].map(shape)];
  root.normalize();
  whole.normalize();
  const elements = [...root.querySelectorAll('*')];
  const found = {
    tags: [...new Set(elements.map((e) => e.tagName))],
    attributes: [...new Set(elements.flatMap((e) => e.getAttributeNames()))],
    links: elements.filter((e) => e.href).map((e) => e.href),
    rels: [...new Set(elements.filter((e) => e.href).map((e) => `${e.target} ${e.rel}`))],
    text: root.textContent,
    same: JSON.stringify(shape(root)) === JSON.stringify(shape(whole)),
    tree: JSON.stringify(shape(root)),
    grown,
  };
  root.remove();
  return found;
}"""

ATTACKS = [
    "<script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "<svg onload=window.hurt=1><a xlink:href='javascript:window.hurt=1'>x</a></svg>",
    "<iframe srcdoc='<script>parent.hurt=1</script>'></iframe><object data=x></object><base href='//evil/'>",
    "[a](javascript:window.hurt=1) [b](JaVaScRiPt:1) [c](java\tscript:1) [d](&#106;avascript:1) [e](vbscript:1)",
    "[f](data:text/html,<script>1</script>) [g](file:///etc/passwd) [h](//evil.example) [i](/v1/models) [j](#x)",
    "![k](https://evil.example/pixel.png) ![l](javascript:1) ![m](data:image/svg+xml,<svg/onload=1>)",
    '[n](https://evil.example/"onclick="window.hurt=1) <https://evil.example/> <javascript:1>',
    "[o]: javascript:window.hurt=1\n\n[o] [o][o]",
    "```<script>\n</code></pre><script>window.hurt = 1</script>\n```",
    '```python" onclick="window.hurt=1\nx = "</span><script>window.hurt = 1</script>"\n```',
    "```html\n<script>window.hurt = 1</script><p style='x' onclick=window.hurt=1>\n",
    "| <script>1</script> | a |\n|:-:|--:|\n| <b onclick=1>x</b> | [p](javascript:1) |",
    "- [x] <input autofocus onfocus=window.hurt=1>\n- [ ] **b\n",
    "&lt;script&gt;window.hurt=1&lt;/script&gt; &#x3c;script&#x3e;",
    "\u0000\ufeff\u202e<script>\u2028window.hurt=1</script>\ud800",
    "**a *b ~~c `d [e](f **g* h~~ i` ](j\n> q\n- r\n  > s\n    - t ```u\n\tv",
    "<style>body{display:none}</style><form action=//evil><button formaction=javascript:1>x",
    "javascript:alert(1) https://evil.example/\u202e/x http://a:b@evil.example mailto:a@b.example",
]

HUGE = {
    "quotes": ">" * 20_000 + " x",
    "brackets": "[" * 20_000 + "](x" * 2_000,
    "stars": "*a **b _c __d ~~e " * 4_000,
    "ticks": " ".join("`" * n for n in range(1, 300)),
    "lists": "\n".join("  " * n + "- x" for n in range(400)),
    "tables": "|" * 10_000 + "\n" + "|-" * 10_000 + "|\n" + "|" * 10_000,
    "links": "[a](b" * 10_000,
    "html": "<a " * 20_000 + "<!--" * 5_000,
    "line": "x" * 400_000,
    "entities": "&" * 30_000 + "&#" * 10_000,
    "code": "```js\n" + "const a = '\\'/*`${" * 5_000,
    "references": "".join(f"[r{n}]: /u\n" for n in range(3_000)) + "[r1]" * 3_000,
    "paragraphs": "One **two** `three`.\n\n" * 3_000,
}

DOCUMENT = """# One

Text with *emphasis*, **strong**, ~~gone~~, `code`, a [link](https://example.org/a?b=c&d) and README.md,
a second line, and https://example.org/auto.

3. three
4. four
   - nested
     - deeper

   with a paragraph

- [ ] open
- [x] done

> quoted
> > twice

| a | b | c |
|---|:-:|--:|
| 1 | 2 | 3 |

---

```python
def f(x):  # comment
    return "text" + str(1)
```

    indented

Setext
------

[ref] and a last line  \nbroken, [later]: no reference

[ref]: https://example.org/ref
"""


@pytest.fixture(scope="module")
def page(chromium):
    with fake_chat_server() as fake:
        page = chromium.new_page()
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: None if fake.url in request.url else page.problems.append(request.url))
        page.goto(fake.url)
        page.wait_for_function("() => document.querySelector('#model').value")
        yield page
        page.context.close()


def check(page, found):
    assert set(found["tags"]) <= ALLOWED
    assert set(found["attributes"]) <= ATTRIBUTES
    assert all(link.startswith(("https://", "http://", "mailto:")) for link in found["links"]), found["links"]
    assert found["rels"] in ([], ["_blank noopener noreferrer"])
    assert page.evaluate("'hurt' in window") is False
    assert page.problems == []


@pytest.mark.parametrize("source", [*ATTACKS, "\n\n".join(ATTACKS)], ids=range(len(ATTACKS) + 1))
def test_what_a_model_writes_never_runs(page, source):
    found = page.evaluate(RENDER, [source, 12])
    check(page, found)
    if "<script>" in source:
        assert "script" in found["text"]  # it is shown, not swallowed


@pytest.mark.parametrize("name", HUGE)
def test_nothing_takes_the_page_down(page, name):
    """What would take quadratic time with a careless parser ends, in one go and in pieces."""
    found = page.evaluate(RENDER, [HUGE[name], 3])
    check(page, found)
    assert found["text"] or name == "quotes"  # the parser leaves out what is nested deeper than a hundred times


def test_markdown_becomes_elements(page):
    found = page.evaluate(RENDER, [DOCUMENT, 1])
    check(page, found)
    tree = found["tree"]
    assert set(found["tags"]) == ALLOWED - {"H5", "H6"}
    assert '["OL",["start=3"]' in tree
    assert '["TH",["class=center"],["b"]]' in tree
    assert '["TD",["class=right"],["3"]]' in tree
    assert '["SPAN",["class=hl-keyword"],["def"]]' in tree
    assert '["SPAN",["class=hl-comment"],["# comment"]]' in tree
    assert tree.count('"type=checkbox"') == 2
    assert found["links"] == [
        "https://example.org/a?b=c&d",
        "https://example.org/auto",
        "https://example.org/ref",
    ]
    assert "README.md" in found["text"]
    assert found["grown"] > 0


@pytest.mark.parametrize("steps", [2, 7, 60, 10_000])
def test_a_stream_ends_as_the_whole_text_does(page, steps):
    """However the text is cut, block by block it becomes what it is in one piece."""
    source = DOCUMENT.replace("[ref] and", "And").replace("[ref]: https://example.org/ref\n", "")
    found = page.evaluate(RENDER, [source, min(steps, len(source))])
    assert found["same"]
    check(page, found)


@pytest.mark.parametrize(
    "source",
    [
        "- a\n**bold** goes on\n",
        "a\n| b | c |\n|---|---|\n| d | e |\n",
        "1. x\n\n   y\n\n-\n--\n",
        "a\r\n\r\nb\r\n- c\r\n",
    ],
)
def test_a_line_that_is_not_ended_decides_nothing(page, source):
    found = page.evaluate(RENDER, [source, len(source)])
    assert found["same"], found["tree"]


FORMULAS = r"""A price of $5 or $10, \$x\$, `$y$` and $a_1*b*c_1$ with \(\frac{a}{b}\, c\).

$$
\begin{aligned} x &= 1 \\ y &= \vec{v} \end{aligned}
$$

\[ \left\{ \begin{array}{l} 1 \\ 2 \\ 3 \\ 4 \end{array} \right. \]

- in a list:
  \[
  \pmb{z} \]
- $$w$$ and text

\begin{pmatrix} 1 & 2 \end{pmatrix}

$$ open

Not open.

| $n^2$ |
|---|
| \(m\) |
"""

BAD_FORMULAS = [
    r"$\href{javascript:window.hurt=1}{x}$ $\url{javascript:1}$ $\includegraphics{https://evil.example/x.png}$",
    r"$\htmlStyle{position:fixed}{x}$ $\htmlId{question}{x}$ $\htmlData{a=b}{x}$ $\htmlClass{icon}{x}$",
    r"$<script>window.hurt=1</script>$ $\text{<img src=x onerror=window.hurt=1>}$ $\undefined$ $}{$ $\frac{$",
    r"$\def\a{\a\a}\a$ $\rule{9999em}{9999em}$ $" + "{" * 3000 + "$ $" + "x" * 20_000 + "$",
    "$" * 20_000 + "\\(" * 20_000 + "\\[" * 5_000,
    "$$\n" * 3_000 + "\\[\n" * 3_000,
    "$a $b " * 10_000,
]


def test_formulas_become_elements(page):
    found = page.evaluate(RENDER, [FORMULAS, 1])
    sources = [
        *(r"a_1*b*c_1", r"\frac{a}{b}\, c", r"\begin{aligned} x &= 1 \\ y &= \vec{v} \end{aligned}"),
        r"\left\{ \begin{array}{l} 1 \\ 2 \\ 3 \\ 4 \end{array} \right.",
        *(r"\pmb{z}", "w", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "n^2", "m"),
    ]
    assert (
        page.evaluate(
            """async (source) => {
          const { MarkdownView } = await import('./page/markdown.js');
          const root = document.createElement('div');
          new MarkdownView(root).update(source, true);
          return [...root.querySelectorAll('annotation')].map((node) => node.textContent.trim());
        }""",
            FORMULAS,
        )
        == sources
    )
    for text in ("A price of $5 or $10, $x$, $y$ and ", " and text", "$$ open", "Not open."):
        assert text in found["text"]
    assert page.problems == []  # the policy forbids style attributes: none was tried


@pytest.mark.parametrize("steps", [2, 7, 60, 10_000])
def test_formulas_grow_as_the_whole_text(page, steps):
    found = page.evaluate(RENDER, [FORMULAS, min(steps, len(FORMULAS))])
    assert found["same"]
    assert page.problems == []


@pytest.mark.parametrize("source", BAD_FORMULAS, ids=range(len(BAD_FORMULAS)))
def test_a_formula_runs_and_loads_nothing(page, source):
    found = page.evaluate(RENDER, [source, 3])
    assert not {"A", "IMG", "SCRIPT", "INPUT"} & set(found["tags"])
    assert not {"href", "src", "id", "onerror"} & set(found["attributes"])
    assert page.evaluate("'hurt' in window") is False
    assert page.problems == []
    assert found["text"]


def test_an_open_fence_is_code_already(page):
    assert page.evaluate(
        """async () => {
          const { MarkdownView } = await import('./page/markdown.js');
          const root = document.createElement('div');
          const view = new MarkdownView(root, { label: 'code' });
          view.update('Before.\\n\\n```js\\nlet a');
          const [before, code] = [root.firstChild, root.querySelector('code')];
          view.update('Before.\\n\\n```js\\nlet a = 1;\\nlet b');
          const grew = root.querySelector('code') === code && root.firstChild === before;
          view.update('Before.\\n\\n```js\\nlet a = 1;\\nlet b\\n```\\nAfter.\\n', true);
          return [grew, root.firstChild === before, root.querySelector('code').textContent, root.lastChild.textContent];
        }"""
    ) == [True, True, "let a = 1;\nlet b\n", "After."]
