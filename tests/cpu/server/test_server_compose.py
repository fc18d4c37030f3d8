"""compose.yaml serves on GPUs by default and on the CPU when asked to, by the same command."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def test_the_services_differ_in_the_gpu_only():
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    gpu, cpu = composed["services"]["warpbus"], composed["services"]["cpu"]
    assert gpu.pop("deploy")["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
    assert cpu.pop("profiles") == ["cpu"]
    (argument, index), *others = cpu.pop("build")["args"].items()
    assert not others
    assert re.search(rf"^ARG {argument}=", image, re.MULTILINE)
    assert index.endswith("/cpu")
    assert gpu.pop("build") == "."
    assert gpu == cpu


def test_the_port_is_published_on_the_loopback_only():
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
