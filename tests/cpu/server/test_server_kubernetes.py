"""The manifests for Kubernetes fit each other, the image, and the options and routes of the server."""

import re
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from warpbus.cli.serve import serve
from warpbus.cuda.memory_size import parse_memory
from warpbus.server import listening
from warpbus.server.app import create_app
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples" / "kubernetes" / "serve.yaml"


@pytest.fixture(scope="module")
def manifests():
    documents = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    assert len(documents) == len({(each["kind"], each["metadata"]["name"]) for each in documents})
    return {each["kind"]: each for each in documents}


@pytest.fixture(scope="module")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


@pytest.fixture
def started(container, monkeypatch):
    """The options with which the container's command serves; nothing is served."""
    found = []
    monkeypatch.setattr(listening, "serve", lambda *options, **others: found.append((*options, others["replicas"])))
    monkeypatch.setattr("warpbus.engine.placement.torch.cuda.device_count", lambda: 2)
    environment = {each["name"]: each.get("value", "a-key-from-the-secret") for each in container["env"]}
    assert environment["MODEL"] == "Qwen/Qwen3-8B"
    verb, *arguments = [re.sub(r"\$\((\w+)\)", lambda name: "demo", each) for each in container["args"]]
    assert verb == "serve"
    app = typer.Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"], env=environment)
    assert result.exit_code == 0, result.output
    return found[0]


def test_kinds_and_selectors(manifests, pod):
    versions = {kind: each["apiVersion"] for kind, each in manifests.items()}
    assert versions == {"PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "Service": "v1"}
    labels = pod["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert manifests["Service"]["spec"]["selector"].items() <= labels.items()


def test_ports(manifests, container, started):
    (port,) = container["ports"]
    (exposed,) = manifests["Service"]["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]
    _, options, _, _ = started
    assert (options.host, options.port) == ("0.0.0.0", port["containerPort"])
    # Everybody in the cluster reaches it, so there is a key.
    assert options.api_keys == ("a-key-from-the-secret",)


def test_probes_ask_a_route_that_needs_no_key(container):
    paths = create_app(Models(), ServerOptions()).openapi()["paths"]
    for name, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        probe = container[name]
        assert probe["httpGet"] == {"path": path, "port": container["ports"][0]["name"]}
        assert not paths[path]["get"].get("security")
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]
    seconds = {name: container[name]["periodSeconds"] * container[name]["failureThreshold"] for name in container
               if name.endswith("Probe")}  # fmt: skip
    # A restart of an engine takes a while: only the pod's own restart must wait for it.
    assert seconds["readinessProbe"] < 30 < 600 < seconds["livenessProbe"] < seconds["startupProbe"]


def test_requests_that_run_have_time_to_end(pod, container, started):
    _, options, _, _ = started
    (_, wait) = container["lifecycle"]["preStop"]["exec"]["command"]
    engines = 10  # seconds that an engine has to stop, see docs/serving.md
    assert pod["spec"]["terminationGracePeriodSeconds"] >= int(wait) + options.shutdown_timeout + engines + 5


def test_resources_suffice_for_the_options(container, started):
    _, _, engine, replicas = started
    limits, requests = (container["resources"][name] for name in ("limits", "requests"))
    assert limits["nvidia.com/gpu"] == replicas.data_parallel * engine.tensor_parallel == 2
    assert limits["memory"] == requests["memory"]  # pinned memory cannot be taken back
    memory = parse_memory(limits["memory"].removesuffix("Gi") + "GiB")
    assert replicas.data_parallel * parse_memory(engine.kv_host_memory) < 0.9 * memory


def test_volumes_and_user_are_those_of_the_image(manifests, pod, container):
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    security = pod["spec"]["securityContext"]
    assert re.search(r"--uid (\d+)", image)[1] == str(security["runAsUser"]) == str(security["fsGroup"])
    assert security["runAsNonRoot"] is True
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert re.search(r"XDG_CACHE_HOME=(\S+)", image)[1] == mounts["cache"]
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifests["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts["shm"] == "/dev/shm"


def test_the_secret_is_named_as_its_command_creates_it(container):
    (secret,) = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
    text = FILE.read_text(encoding="utf-8")
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text
