"""The rules that keep the house in shape. A rule may be tightened; none is loosened for one change."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "warpbus"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 600

# Plain models that are benchmarks' peers are built as a reader of PyTorch expects, with the names that go with it.
PLAIN_MODELS = {PACKAGE / "bench" / "plain.py", PACKAGE / "bench" / "train_plain.py"}

# Imports inside functions exist only in the command line, for its start-up time.
LAZY = PACKAGE / "cli"


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_it_should_be(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_import_inside_a_function_dodges_a_cycle():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if LAZY not in path.parents
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("warpbus"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("warpbus") for alias in node.names))
    ]
    # The public API at the top of the package loads its rooms on first use: `import warpbus` stays light.
    assert [place for place in found if not place.startswith("src/warpbus/__init__.py")] == []


def test_every_environment_variable_is_documented():
    pattern = re.compile(r"""environ(?:\.get|\.setdefault)?[\[(]\s*["']([A-Z_]+)["']""")
    used = {name for path in SOURCES for name in pattern.findall(path.read_text(encoding="utf-8"))}
    documented = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert {name for name in used if f"`{name}`" not in documented} == set()


def test_no_room_is_called_utils():
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [path for path in PACKAGE.rglob("*.py") if vague & {path.stem, *path.relative_to(PACKAGE).parts}] == []


def test_nothing_is_unpickled_or_evaluated():
    forbidden = re.compile(r"\bimport pickle\b|\bpickle\.loads?\(|(?<![\w.])eval\(|(?<![\w.])exec\(|weights_only=False")
    loads = re.compile(r"torch\.load\((?![^)]*weights_only=True)")
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not forbidden.search(text), path
        assert not loads.search(text), path


def test_a_class_name_occurs_once():
    """A leading underscore does not make another name of it."""
    found = Counter(
        node.name.lstrip("_")
        for path in SOURCES
        if path not in PLAIN_MODELS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in found.items() if count > 1} == {}


def test_every_room_says_what_it_is():
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{path.relative_to(ROOT)} has no docstring at its top"


def test_import_is_light():
    """`import warpbus` and the command line load no torch."""
    code = "import sys, warpbus, warpbus.cli; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_process_of_a_run_loads_only_what_it_needs():
    """Each GPU has an interpreter that starts while the others wait: to read texts, draw or compile is not its work."""
    code = (
        "import sys, warpbus.dist.worker, warpbus.quantization.job; "
        "print(*{'matplotlib', 'jinja2', 'typer', 'ray', 'torch._dynamo', 'warpbus.quantization.driver', "
        "'warpbus.models.documents'}.intersection(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_an_engine_loads_no_compiler():
    """It takes longer to load than the rest of torch, and who chats or serves would wait for it."""
    code = "import sys, warpbus.engine.serving_process; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_what_is_timed_loads_no_other_benchmark():
    """The seconds of `bench quantize` begin with the start of a process."""
    code = (
        "import sys, warpbus.bench.quantization_process; "
        "print(*{'matplotlib', 'warpbus.bench.decode', 'warpbus.engine', 'torch._dynamo'}.intersection(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_quantize_loads_nothing_that_it_does_not_need():
    """Engine, evaluation and pictures take longer to load than the rest, and the GPUs would wait for it."""
    code = (
        "import sys; from warpbus.cli import main; sys.argv = ['warpbus', 'quantize', 'no-model', 'out']\n"
        "sys.argv += ['--algorithm', 'rtn', '--device', 'cpu']\n"
        "try: main()\n"
        "finally: print(*{'matplotlib', 'warpbus.engine.engine', 'warpbus.evaluation', 'torch._dynamo', 'ray'}"
        ".intersection(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no-model" in found.stderr
    assert (found.returncode, found.stdout.split()) == (1, [])


def test_links_in_the_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), PACKAGE / "demo" / "glm-poet" / "README.md"]
    fences = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)  # in code, f[x](y) is no link
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", fences.sub("", document.read_text("utf-8")))
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_paths_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w./-]+)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_anchors_in_the_documents_exist():
    """`page.md#section` names a heading of the page, as GitHub spells it."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    fences = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    texts = {document.resolve(): fences.sub("", document.read_text("utf-8")) for document in documents}
    headings = {
        document: {
            re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        for document, text in texts.items()
    }
    links = [
        (document, (document.parent / (target or document.name)).resolve(), anchor)
        for document, text in texts.items()
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text)
    ]
    assert len(links) > 10
    assert [
        f"{document.name}: {page.name}#{anchor}" for document, page, anchor in links if anchor not in headings[page]
    ] == []
