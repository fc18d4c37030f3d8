"""Make a release: set the version, then build, check and try the distributions. Nothing is uploaded.

    python scripts/release.py version 0.2.0      # writes version and date; then commit and tag
    python scripts/release.py build --repository https://github.com/OWNER/warpbus

`build` takes the last commit, not the work tree. It adds the URLs of the repository to the metadata and makes the links
of the README absolute, since a package index resolves no relative ones. `twine check` has to accept both distributions,
and the wheel has to quantize and run the packaged model in an empty environment. Needs the extra `release`.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?P<start>(?P<image>!?)\[[^]\[]*\]\()(?!https?:|#|mailto:)(?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"""\b(src)="(?!https?:)([^"]+)\"""")

# What a release without these would be: a command that fails on a user's machine only.
IN_WHEEL = (
    "warpbus/kernels/csrc/ladder/vector_add.cu",
    "warpbus/cuda/on_cpu/cuda_runtime.h",
    "warpbus/cuda/on_cpu/runtime.cpp",
    "warpbus/server/page/index.html",
    "warpbus/server/pool_page/index.html",
    "warpbus/figures/page.html",
    "warpbus/demo/glm-poet/model.safetensors",
    "warpbus/demo/data/calibration.jsonl",
    "warpbus/quantization/data/general.jsonl",
    "warpbus/py.typed",
)
IN_SOURCES = (
    *("Makefile", "CHANGELOG.md", "README.zh-CN.md", "Dockerfile", "scripts/environment.py", "tests/conftest.py"),
    *("docs/quantization.md", "docs/pictures/chat_page.png", "examples/mlp_from_scratch.py", "benchmarks/results"),
)


class ReleaseError(Exception):
    """A reason not to make the release."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("version", help="set version and date").add_argument("number")
    build = verbs.add_parser("build", help="build, check and try the distributions of the last commit")
    build.add_argument(
        "--repository", help="https address of the public repository; default: that of the remote origin"
    )
    build.add_argument("--output", type=Path, default=ROOT / "dist", help="directory of the distributions")
    build.add_argument("--no-trial", action="store_true", help="do not install the wheel into an empty environment")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "version":
            set_version(given.number, datetime.datetime.now(tz=datetime.UTC).date())
        else:
            make(repository_of(given.repository), given.output.resolve(), trial=not given.no_trial)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def set_version(number: str, date: datetime.date, root: Path = ROOT) -> None:
    """Write the version into the package, and the version and the date into the first heading of the changelog.

    Raises:
        ReleaseError: the number is no version, or the first heading is not that of an unreleased version.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", number):
        raise ReleaseError(f"version {number!r}: expected MAJOR.MINOR.PATCH, such as 0.2.0 or 0.2.0rc1")
    package, changelog = root / "src" / "warpbus" / "__init__.py", root / "CHANGELOG.md"
    text, changes = package.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")
    heading = re.search(r"^## (.*)$", changes, re.MULTILINE)
    if heading is None or not heading[1].endswith(" (unreleased)"):
        raise ReleaseError(f"{changelog}: the first section has to be headed '## VERSION (unreleased)'")
    package.write_text(re.sub(r'^__version__ = ".*"$', f'__version__ = "{number}"', text, flags=re.MULTILINE), "utf-8")
    changelog.write_text(changes.replace(heading[0], f"## {number} ({date.isoformat()})", 1), encoding="utf-8")
    print(f"version {number}: commit it, tag it v{number}, and run: scripts/release.py build")


def repository_of(given: str | None) -> str:
    """The https address of the repository, without a slash or .git at its end.

    Raises:
        ReleaseError: there is none.
    """
    if given is None:
        found = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
        given = re.sub(r"^git@([^:]+):", r"https://\1/", found.stdout.strip())
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]+", given):
        raise ReleaseError(f"repository {given!r}: give its https address with --repository")
    return given.removesuffix("/").removesuffix(".git")


def make(repository: str, output: Path, *, trial: bool) -> None:
    """Build both distributions of the last commit in `output`, check them, and try the wheel."""
    with tempfile.TemporaryDirectory() as place:
        sources = Path(place, "sources")
        sources.mkdir()
        archive = Path(place, "sources.tar")
        subprocess.run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT, check=True)
        with tarfile.open(archive) as packed:
            packed.extractall(sources, filter="data")
        version = re.search(r'^__version__ = "(.*)"', (sources / "src/warpbus/__init__.py").read_text("utf-8"), re.M)
        assert version is not None
        publish(sources, repository, f"v{version[1]}")
        subprocess.run([sys.executable, "-m", "build", "--outdir", output, sources], check=True)
        wheel = next(output.glob(f"warpbus-{version[1]}-*.whl"))
        packed_sources = output / f"warpbus-{version[1]}.tar.gz"
        check_contents(wheel, packed_sources)
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, packed_sources], check=True)
        if trial:
            try_wheel(wheel, Path(place))
    print(f"release: {wheel} and {packed_sources} are ready to upload: python -m twine upload")


def publish(sources: Path, repository: str, tag: str) -> None:
    """Add the URLs of the repository to pyproject.toml, and make the links of README.md absolute."""
    readme, project = sources / "README.md", sources / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "\n".join(["[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items())])
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace("[project.scripts]", f"{table}\n\n[project.scripts]", 1), encoding="utf-8")


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Markdown whose relative links lead to the files of a tag of the repository."""

    def absolute(link: re.Match[str]) -> str:
        return f"{link['start']}{repository}/{'raw' if link['image'] else 'blob'}/{tag}/{link['target']})"

    return IMAGE.sub(rf'\1="{repository}/raw/{tag}/\2"', LINK.sub(absolute, text))


def check_contents(wheel: Path, sources: Path) -> None:
    """Look for files without which a part of Warpbus does not work.

    Raises:
        ReleaseError: one of them is missing.
    """
    with zipfile.ZipFile(wheel) as packed:
        installed = set(packed.namelist())
    with tarfile.open(sources) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_WHEEL if name not in installed] + [
        name for name in IN_SOURCES if name not in shipped
    ]
    if missing:
        raise ReleaseError(f"missing in the distributions: {', '.join(missing)}")


def try_wheel(wheel: Path, place: Path) -> None:
    """Install the wheel into an empty environment, and quantize and run the packaged model with it."""
    home = place / "empty"
    venv.create(home, with_pip=True)
    python, command = home / "bin" / "python", home / "bin" / "warpbus"
    for text, arguments in environment.torch_sources():
        print(f"release: {text}", flush=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments]).returncode == 0:
            break
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[serve]"], check=True)
    for words in (
        ["--version"],
        ["doctor"],
        ["quantize", "demo", "poet-w4", "--samples", "16"],
        ["chat", "poet-w4", "--prompt", "写一首题为《春夜》的五言绝句。"],
        ["serve", "--help"],
    ):
        print(f"release: warpbus {' '.join(words)}", flush=True)
        subprocess.run([command, *words], cwd=place, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
