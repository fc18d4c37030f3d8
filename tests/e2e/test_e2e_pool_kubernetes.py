"""The Kubernetes manifest of the pool: its parts refer to each other, and its daemons start with their arguments."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
import yaml

import warpbus
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "pool.yaml"
SERVICE, BROKER, NODE = list(yaml.safe_load_all(MANIFEST.read_text()))
WORKLOADS = [BROKER, NODE]
TOKENS = "A" * 43 + " ann memory=1GB\n" + "B" * 43 + " root admin\n"


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def daemon(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod(workload)["containers"]
    return dict(container)


@pytest.mark.parametrize("workload", WORKLOADS, ids=["broker", "node"])
def test_its_parts_refer_to_each_other(workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    assert workload["apiVersion"] == "apps/v1"
    assert workload["metadata"]["namespace"] == SERVICE["metadata"]["namespace"] == "warpbus-pool"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    volumes = {each["name"] for each in pod(workload)["volumes"]}
    volumes |= {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
    containers = [*pod(workload)["initContainers"], daemon(workload)]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == volumes
    paths = {mount["mountPath"] for mount in daemon(workload)["volumeMounts"]}
    for argument in daemon(workload)["args"]:
        _, _, value = argument.partition("=")
        if value.startswith("/"):
            assert f"/{value.split('/')[1]}" in paths, argument
    ports = {port["name"] for port in daemon(workload)["ports"]}
    assert daemon(workload)["readinessProbe"]["tcpSocket"]["port"] in ports


@pytest.mark.parametrize("workload", WORKLOADS, ids=["broker", "node"])
def test_its_containers_have_no_rights_that_they_do_not_need(workload: dict[str, Any]) -> None:
    assert pod(workload)["securityContext"]["runAsNonRoot"] is True
    assert pod(workload)["automountServiceAccountToken"] is False
    for each in (*pod(workload)["initContainers"], daemon(workload)):
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
    assert "secret" in {key for volume in pod(workload)["volumes"] for key in volume}


def test_the_service_and_the_nodes_find_the_broker() -> None:
    assert SERVICE["spec"]["selector"] == BROKER["spec"]["template"]["metadata"]["labels"]
    name = f"{SERVICE['metadata']['name']}.{SERVICE['metadata']['namespace']}.svc"
    assert f"--advertise={name}" in daemon(BROKER)["args"]
    assert f"--peer=warpbuss://{name}:{SERVICE['spec']['ports'][0]['port']}" in daemon(NODE)["args"]
    assert (NODE["kind"], NODE["spec"]["updateStrategy"]) == ("DaemonSet", {"type": "OnDelete"})
    assert any("fieldRef" in str(each) for each in daemon(NODE)["env"] if each["name"] == "NODE")


class Container:
    """A daemon of the manifest as a process here: with its arguments, other paths and a free port."""

    def __init__(self, workload: dict[str, Any], root: Path, **replaced: str) -> None:
        given = {"port": "0", "advertise": "localhost", **replaced}
        arguments = []
        for argument in daemon(workload)["args"]:
            name, equals, value = argument.partition("=")
            value = given.get(name.removeprefix("--"), value.replace("$(NODE)", "node"))
            arguments.append(name + equals + (f"{root}{value}" if value.startswith("/") else value))
        self.log = root / f"{workload['metadata']['name']}.log"
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "warpbus", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 90
        while "ready: " not in (said := self.log.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.1)
        self.port = int(said.partition("localhost:")[2].split()[0])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(90)


@pytest.fixture
def pool() -> Iterator[tuple[int, Path]]:
    """The pool of the manifest on this machine: the broker's port, and the certificate."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("secrets", "state", "checkpoints"):
            (root / name).mkdir()
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        issued.private_key_pem.write_to_path(root / "secrets" / "tls.key")
        for blob in issued.cert_chain_pems:
            blob.write_to_path(root / "secrets" / "tls.crt")
        authority.cert_pem.write_to_path(root / "secrets" / "ca.crt")
        (root / "secrets" / "tokens").write_text(TOKENS)
        (root / "secrets" / "peer-token").write_text("B" * 43)
        for each in (root / "secrets").iterdir():
            each.chmod(0o600)
        trust = {"authority": "/secrets/ca.crt"}
        broker = Container(BROKER, root, **trust)
        node = Container(NODE, root, peer=f"warpbuss://localhost:{broker.port}", **trust)
        try:
            yield broker.port, root / "secrets" / "ca.crt"
        finally:
            node.close()
            broker.close()


def test_its_daemons_are_a_pool(pool: tuple[int, Path]) -> None:
    port, authority = pool
    where = f"warpbuss://localhost:{port}?ca={authority}"
    with ControlChannel(address(where), "A" * 43) as control:
        assert {each["host"] for each in control.ask("status")["gpus"]} == {"broker", "node"}
    with warpbus.pool.connect(where, memory="10MB", share=0.1, token="A" * 43) as gpu:
        assert gpu.name == "node/0"
        assert torch.arange(4.0).to(gpu.device).sum().item() == 6.0
