"""`scripts/release.py`: the parts of a release that need no package index, and the licences that the package states."""

import datetime
import importlib.util
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "release", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "src" / "warpbus").mkdir(parents=True)
    (tmp_path / "src" / "warpbus" / "__init__.py").write_text('"""Doc."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n\n- A.\n\n## 0.0.9 (2026-01-01)\n")
    (tmp_path / "README.md").write_text(
        "[docs](docs/pool.md#leases) ![page](docs/a.png) [web](https://x.y) [up](#up)\n"
    )
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "warpbus"\n\n[project.scripts]\nwarpbus = "a:b"\n')
    return tmp_path


def test_a_version_is_written_with_its_date(release, checkout):
    release.set_version("0.2.0", datetime.date(2026, 11, 24), checkout)
    assert '__version__ = "0.2.0"\n' in (checkout / "src/warpbus/__init__.py").read_text()
    assert (checkout / "CHANGELOG.md").read_text().splitlines()[2] == "## 0.2.0 (2026-11-24)"
    with pytest.raises(release.ReleaseError, match="unreleased"):
        release.set_version("0.3.0", datetime.date(2026, 11, 25), checkout)


@pytest.mark.parametrize("number", ["2", "0.2", "v0.2.0", "0.2.0-final"])
def test_what_is_no_version_is_refused(release, checkout, number):
    with pytest.raises(release.ReleaseError, match=r"MAJOR\.MINOR\.PATCH"):
        release.set_version(number, datetime.date(2026, 11, 24), checkout)


def test_a_published_readme_has_no_relative_links(release, checkout):
    release.publish(checkout, "https://example.org/team/warpbus", "v0.1.0")
    assert (checkout / "README.md").read_text() == (
        "[docs](https://example.org/team/warpbus/blob/v0.1.0/docs/pool.md#leases) "
        "![page](https://example.org/team/warpbus/raw/v0.1.0/docs/a.png) [web](https://x.y) [up](#up)\n"
    )
    urls = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == "https://example.org/team/warpbus"
    assert urls["Changelog"] == "https://example.org/team/warpbus/blob/v0.1.0/CHANGELOG.md"


def test_the_readme_of_this_repository_is_made_absolute(release):
    text = release.absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/w", "v1")
    assert text.count("https://example.org/w/") > 10
    assert release.LINK.search(text) is None
    assert release.IMAGE.search(text) is None


@pytest.mark.parametrize("given", ["", "warpbus", "http://example.org/a", "ftp://example.org/a b"])
def test_a_repository_has_an_https_address(release, given):
    with pytest.raises(release.ReleaseError, match="--repository"):
        release.repository_of(given)


def test_a_distribution_without_a_needed_file_is_refused(release, tmp_path):
    wheel, sources = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in release.IN_WHEEL[1:]:
            packed.writestr(name, "")
    with tarfile.open(sources, "w:gz") as archive:
        archive.add(ROOT / "Makefile", "warpbus-1/Makefile")
    with pytest.raises(release.ReleaseError) as error:
        release.check_contents(wheel, sources)
    assert release.IN_WHEEL[0] in str(error.value)
    assert "tests/conftest.py" in str(error.value)
    assert "Makefile," not in str(error.value)


def test_files_of_a_release_are_in_the_repository(release):
    assert [name for name in release.IN_WHEEL if not (ROOT / "src" / name).is_file()] == []
    assert [name for name in release.IN_SOURCES if not (ROOT / name).exists()] == []


def test_each_licence_of_the_expression_is_stated_in_a_packaged_file():
    files = [path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)]
    assert {path.name for path in files} > {"LICENSE", "LICENSE.entities", "README.md"}
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    phrases = {
        "Apache-2.0": "Apache License",
        "MIT": "Permission is hereby granted",
        "BSD-2-Clause": "Redistribution and use",
        "BSD-3-Clause": "Neither the name",
        "CC-BY-SA-3.0": "CC BY-SA 3.0",
        "OFL-1.1": "SIL OPEN FONT LICENSE",
    }
    assert PROJECT["license"].split(" AND ") == list(phrases)
    assert [name for name, phrase in phrases.items() if phrase not in text] == []


def test_the_tested_versions_of_python_are_classified():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    named = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if " Python :: 3." in line]
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert all(f'"{version}"' in workflow for version in named)
