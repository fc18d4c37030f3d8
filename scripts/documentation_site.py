"""Build the documentation site of this checkout in build/site: every document, in both languages, and the API.

    python scripts/documentation_site.py [--repository https://github.com/OWNER/warpbus]

The documents stay readable in the repository: this script arranges them for mkdocs, and rewrites their links. Files
that documents link to, such as kernels, are copied, so that the site is complete; links to directories lead to the
repository if there is one, else they are plain text. mkdocs checks every link and anchor (--strict). Needs the extra
`docs`.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
THEME = ROOT / "scripts" / "site_theme"

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
# Between Chinese characters, and after Chinese punctuation, a line break of the source must not become a space.
CHINESE_BREAK = re.compile(
    r"(?<=[\u3000-\u303f\u3400-\u9fff\uff00-\uffef])\n *(?=[\u3000-\u303f\u3400-\u9fff\uff00-\uffef])"
    r"|(?<=[，。；：、（）])\n *(?![0-9]+\. )(?=[A-Za-z0-9+`\[])"
)
LINK = re.compile(r'(?P<start>\]\(|src=")(?!https?:|#|mailto:)(?P<target>[^)#\s"]+)(?P<anchor>#[^)\s"]*)?(?P<end>[)"])')

# The answer of an exercise, within a numbered list; a picture in a line of its own.
ANSWER = re.compile(r"^   <details><summary>(.*?)</summary>\n(.*?)^   </details>$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"^!\[[^\]]*\]\((?P<target>[^)]+)\)$", re.MULTILINE)

# Anchors as GitHub makes them, of Chinese headings too. safe_dump writes no Python objects.
SLUGIFY = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"

# Pages that are elsewhere in the site than in the repository.
PLACES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
GROUPS = {
    "Use": (
        *("install", "quantization", "verdict", "serving", "server_api", "clients", "adapters", "training", "memory"),
        "parallel",
    ),
    "Share GPUs": (
        *("pool", "remote_gpu", "pool_distributed", "gpu_sharing", "gpu_migration", "pool_operation", "pool_security"),
    ),
    "Models and formats": ("models", "moe", "mla", "mtp", "formats", "gguf", "hub"),
    "Measurements": ("benchmarks", "benchmark_results", "quantization_quality", "benchmark_cases"),
    "Reference": ("reference", "environment", "glossary", "changelog"),
    "Develop": (
        *("architecture", "scheduling", "quantization_methods", "quantized_kernels", "attention_kernels"),
        *("cpu_kernels", "chat_page", "contributing"),
        *("add_a_model", "add_a_kernel", "add_an_algorithm", "add_an_endpoint"),
    ),
}
CHINESE_GROUPS = {
    "Use": "使用",
    "Share GPUs": "共享 GPU",
    "Models and formats": "模型与格式",
    "Measurements": "实测数据",
    "Reference": "参考",
    "Develop": "开发",
}
API = {
    "Quantization": ("warpbus.quantize", "warpbus.quantization.Report"),
    "Inference": ("warpbus.LLM", "warpbus.SamplingParams", "warpbus.Completion"),
    "GPU pool": ("warpbus.pool.connect", "warpbus.pool.Gpu"),
    "Errors": ("warpbus.errors",),
}
CHINESE_API = {"Quantization": "量化", "Inference": "推理", "GPU pool": "GPU 池", "Errors": "错误"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", help="https address of the public repository")
    repository = parser.parse_args(arguments).repository
    pages = BUILD / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    arrange(pages, repository)
    configuration = BUILD / "mkdocs.yml"
    text = yaml.safe_dump(settings(pages, repository), allow_unicode=True, sort_keys=False)
    configuration.write_text(text.replace("SLUGIFY", SLUGIFY), encoding="utf-8")
    # Not --quiet: it would hide warnings from --strict too.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", configuration]
    ).returncode


def arrange(pages: Path, repository: str | None) -> None:
    """Write the pages, and the files that they show or link to, to a directory."""
    waiting = [*PLACES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file())]
    arranged: set[str] = set()
    while waiting:
        source = waiting.pop()
        if source in arranged:
            continue
        arranged.add(source)
        target = pages / place_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text, linked = rewritten(source, (ROOT / source).read_text(encoding="utf-8"), repository)
            target.write_text(text, encoding="utf-8")
            waiting += linked
        else:
            shutil.copyfile(ROOT / source, target)
    (pages / "reference.md").write_text(reference("# Python API", {title: title for title in API}), encoding="utf-8")
    # The search has the English page, which has the same text.
    chinese_reference = reference(
        "---\nsearch:\n  exclude: true\n---\n\n# Python API\n\n函数和类的说明取自源代码，为英文。", CHINESE_API
    )
    (pages / "zh" / "reference.md").write_text(chinese_reference, encoding="utf-8")


def reference(head: str, titles: dict[str, str]) -> str:
    """The page of the Python API, with a title in the language of the page for each group of names."""
    lines = [head, ""]
    for group, names in API.items():
        lines += [f"## {titles[group]}", "", *(f"::: {name}\n" for name in names)]
    return "\n".join(lines)


def place_of(source: str) -> str:
    """Where the site has a file of the repository."""
    if source in PLACES:
        return PLACES[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}"


def rewritten(source: str, text: str, repository: str | None) -> tuple[str, list[str]]:
    """A document with the links of the site, and the files of the repository that it links to."""
    linked: list[str] = []
    here = posixpath.dirname(place_of(source))

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        if (ROOT / path).is_dir():
            return f"{link['start']}{repository}/tree/main/{path}{link['end']}" if repository else f"](#{link['end']}"
        linked.append(path)
        return f"{link['start']}{posixpath.relpath(place_of(path), here or '.')}{link['anchor'] or ''}{link['end']}"

    parts = FENCE.split(text)
    parts[::2] = [for_mkdocs(without_dead_links(LINK.sub(moved, part))) for part in parts[::2]]
    return ANSWER.sub(admonition, "".join(parts)), linked


def for_mkdocs(text: str) -> str:
    """Text outside code: pictures open in their full size, and no blank comes between lines of Chinese."""
    return CHINESE_BREAK.sub("", PICTURE.sub(r"[\g<0>](\g<target>)", text))


def admonition(answer: re.Match[str]) -> str:
    """A folded answer that mkdocs renders inside the item of a list; Python-Markdown ends the list at HTML."""
    lines = [line.removeprefix("   ") for line in answer[2].splitlines()]
    body = "\n".join(f"        {line}".rstrip() for line in lines)
    return f'    ??? question "{answer[1]}"\n{body}'


def without_dead_links(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\(#\)", r"\1", text)


def settings(pages: Path, repository: str | None) -> dict[str, object]:
    """The configuration of mkdocs."""
    found: dict[str, object] = {
        "site_name": "Warpbus",
        "docs_dir": str(pages),
        "site_dir": str(BUILD / "site"),
        "nav": [{"English": list(english())}, {"中文": list(chinese(pages))}],
        "theme": {
            "name": "material",
            "custom_dir": str(THEME),
            "font": False,  # no request to another host
            "logo": "files/src/warpbus/server/page/mark.svg",
            "favicon": "files/src/warpbus/server/page/mark.svg",
            "features": [
                *("navigation.tabs", "navigation.sections", "navigation.top"),
                *("content.code.copy", "search.highlight"),
            ],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "black", "accent": "amber"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "black", "accent": "amber"},
            ],
        },
        "plugins": [
            {"search": {"lang": ["en", "zh"]}},
            {"autorefs": {"resolve_closest": True}},  # both pages of the API have each name
            {
                "mkdocstrings": {
                    "handlers": {
                        "python": {
                            "paths": [str(ROOT / "src")],
                            "options": {
                                "extensions": [f"{ROOT / 'scripts' / 'site_api.py'}:FieldDefaults"],
                                "heading_level": 3,
                                "show_root_heading": True,
                                "show_source": False,
                                "separate_signature": True,  # as code that ruff has formatted, below a short heading
                                "line_length": 88,
                                "members_order": "source",
                            },
                        }
                    }
                }
            },
        ],
        "markdown_extensions": [
            {"toc": {"permalink": True, "slugify": "SLUGIFY"}},
            *(
                "tables",
                "attr_list",
                "md_in_html",
                "pymdownx.superfences",
                "pymdownx.details",
                "admonition",
                "pymdownx.highlight",
            ),
        ],
        "extra_css": ["site.css"],
        "not_in_nav": "files/**",
        "validation": {"links": {"anchors": "warn", "unrecognized_links": "warn"}},
        # The menu of partials/alternate.html. A list here would add links to the head of each page, as if each language
        # were a site of its own, and the theme's script would ask for a sitemap.xml in the directory of each.
        "extra": {"alternate": True},
    }
    return found | ({"repo_url": repository} if repository else {})


def english() -> Iterator[dict[str, object]]:
    """The navigation of the English pages."""
    yield {"Warpbus": "index.md"}
    for name, group in GROUPS.items():
        yield {name: [f"{page}.md" for page in group]}
    chapters = sorted(path.name for path in (ROOT / "docs" / "tutorial").glob("[0-9]*.md") if "zh-CN" not in path.name)
    yield {"Learn CUDA": ["tutorial/README.md", *(f"tutorial/{name}" for name in chapters), "cuda_programs.md"]}


def chinese(pages: Path) -> Iterator[dict[str, object]]:
    """The navigation of the Chinese pages, in the order of the English ones."""
    yield {"Warpbus": "zh/index.md"}
    for name, group in GROUPS.items():
        yield {CHINESE_GROUPS[name]: [f"zh/{page}.md" for page in group if (pages / "zh" / f"{page}.md").exists()]}
    chapters = sorted(f"tutorial/{path.name}" for path in (pages / "tutorial").glob("[0-9]*.zh-CN.md"))
    yield {"学习 CUDA": ["tutorial/README.zh-CN.md", *chapters, "zh/cuda_programs.md"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
