"""Build the virtual environment `.venv` of this checkout. Needs nothing but Python and pip's usual settings.

    python3 scripts/environment.py [EXTRA ...]

- A torch that the running Python already has is used, not installed again: the environment is layered over it.
- Without an NVIDIA GPU the CPU build of torch is asked for first, of pip's index and of PyTorch's own, and the ordinary
  build, with gigabytes of CUDA libraries, only if there is none.
- Where no package can be downloaded, what is installed already has to do; what is missing is named.
"""

import importlib.metadata
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
OLDEST_TORCH = (2, 11)
TESTED_TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(extras: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file has to say so before anything is installed
        return _fail(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 demo")
    if not PYTHON.exists():
        _say("creating .venv")
        _create()
    if not _runs("import torch"):
        _install_torch()
    if not _runs("import torch"):
        return _fail("torch could not be installed: see pip's message above")
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    _say(f"installing warpbus ({', '.join(extras)})" if extras else "installing warpbus")
    # The build backend comes from the environment, so that an installation needs no download where it is there.
    if not _runs("import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"):
        _pip("install", "--quiet", "setuptools>=77", "wheel")  # without wheel, an older pip warns of packages in source
    if _pip("install", "--quiet", "--no-build-isolation", "--editable", wanted):
        return 0
    _say("some packages could not be downloaded: going on with what is installed")
    if not _pip("install", "--quiet", "--no-build-isolation", "--no-deps", "--editable", str(ROOT)):
        return _fail("warpbus could not be installed: see pip's message above")
    missing = [(requirement, extra) for requirement, extra in _missing() if extra in ("", *extras)]
    for requirement, extra in missing:
        _say(f"missing: {requirement}" + (f" (for {extra})" if extra else ""))
    if any(not extra for _, extra in missing):
        return _fail("connect to a package index, or install these packages, and try again")
    return 0


def _create() -> None:
    try:
        venv.create(ENVIRONMENT, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:  # Python without ensurepip, as Debian ships it
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=False, symlinks=True)
    if not _runs("import pip") or _usable_torch():
        inside = next(ENVIRONMENT.glob("lib/python*/site-packages"))
        parents = [path for path in [*site.getsitepackages(), site.getusersitepackages()] if Path(path).is_dir()]
        (inside / "parent-environment.pth").write_text("\n".join(parents) + "\n")


def _usable_torch() -> bool:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TORCH


def _install_torch() -> None:
    for text, arguments in torch_sources():
        _say(text)
        if _pip("install", "--quiet", *arguments, quiet=len(arguments) > 1 or "+cpu" in arguments[0]):
            return


def torch_sources() -> list[tuple[str, list[str]]]:
    """Sources of the tested torch for this machine, best first: a sentence and the arguments of pip install."""
    usual = [f"torch=={TESTED_TORCH}"]
    if _has_nvidia_gpu():
        return [(f"installing torch {TESTED_TORCH}", usual)]
    return [
        (f"no NVIDIA GPU found: installing the CPU build of torch {TESTED_TORCH}", [f"torch=={TESTED_TORCH}+cpu"]),
        ("pip's index has no CPU build: asking PyTorch's", [*usual, "--index-url", CPU_INDEX]),
        ("no CPU build could be installed: installing the ordinary build, with about 3 GB of CUDA libraries", usual),
    ]


def _has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() or bool(shutil.which("nvidia-smi"))


def _missing() -> list[tuple[str, str]]:
    """The requirements of warpbus that are not there, each with the extra that asks for it."""
    code = (
        "import importlib.metadata as m, re\n"
        "for r in m.requires('warpbus'):\n"
        "    name = re.match(r'[\\w.-]+', r)[0]\n"
        "    extra = re.search(r'extra == .(\\w+)', r)\n"
        "    try: m.version(name)\n"
        "    except m.PackageNotFoundError: print(r.split(';')[0].strip(), extra[1] if extra else '', sep='\\t')\n"
    )
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in found.splitlines()]
    return [(row[0], row[1]) for row in rows]


def _runs(code: str) -> bool:
    return subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0


def _pip(*arguments: str, quiet: bool = False) -> bool:
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--retries", "2", *arguments]
    return subprocess.run(command, capture_output=quiet).returncode == 0


def _say(text: str) -> None:
    print(f"environment: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    _say(text)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
