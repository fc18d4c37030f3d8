"""Settings of all tests."""

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# As the command does: torch's CPU threads sleep while they wait, whatever else runs on the machine. libgomp reads this
# when torch is imported. With threads that spin, tests take ten times as long beside other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests expect the English of the command line, whatever the developer's locale.
os.environ["WARPBUS_LANG"] = "en"
# Images of containers set it. Each of the many processes that the tests start would compile the package again, which
# takes up to half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Of several processes of pytest-xdist each computes with its share of the cores.
if WORKERS := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

import torch

from warpbus.demo import model_path

sys.dont_write_bytecode = False  # this process has read the variable already

CHROMIUM = Path("/usr/bin/chromium")

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's business.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of the fixture `seed`: repeats a test that failed with it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, and exempt what stays until the end from later ones.

    Modules and tests are millions of objects. Going through them again and again takes half of the time of this phase.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist=loadfile` sends all files that need a Ray cluster to one worker: each worker would start its own."""
    if config.getvalue("dist") != "loadfile":
        return None
    xdist = pytest.importorskip("xdist.scheduler")
    root = config.rootpath

    @functools.cache
    def scope(file: str) -> str:
        text = (root / file).read_text(encoding="utf-8")
        return "ray" if "two_nodes" in text or "ray_cluster" in text else file

    class Scheduling(xdist.LoadFileScheduling):  # type: ignore[misc, name-defined]
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid.partition("::")[0])

    return Scheduling(config, log)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another seed at each run, which torch's random numbers begin with. A test that fails shows it."""
    given = request.config.getoption("--seed")
    drawn = int.from_bytes(os.urandom(4)) if given is None else given
    print(f"random numbers of this test: repeat them with --seed {drawn}")
    torch.manual_seed(drawn)
    return drawn


@pytest.fixture(scope="session")
def poet_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained mixture of experts (`tests/poet-moe-small`) with its tokenizer, which is that of glm-poet."""
    directory = tmp_path_factory.mktemp("poet-moe") / "poet-moe-small"
    shutil.copytree(Path(__file__).parent / "poet-moe-small", directory)
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_path() / name, directory)
    return directory


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright. Its event loop runs in this thread, so it ends with the module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no Chromium at {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
