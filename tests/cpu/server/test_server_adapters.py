"""Adapters under names of their own, beside the model that has them: one service, asked by the name."""

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_fakes import FakeService, Running, until

from warpbus.errors import UsageError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

HELLO = [{"role": "user", "content": "ab"}]
NAMES = ("parrot", "li-bai", "org/du-fu")


@pytest.fixture
def service():
    return FakeService("<sop>")


@pytest.fixture
def running(service):
    models = Models()
    models.add("other", FakeService())
    models.add("parrot", service, adapters=NAMES[1:])
    with Running(models, ServerOptions()) as running:
        yield running


@pytest.fixture
def client(running):
    with running.openai() as client:
        yield client


@pytest.fixture
def http(running):
    with running.http() as http:
        yield http


def test_the_name_chooses_the_adapter(client, service):
    for name, adapter in zip(NAMES, (None, *NAMES[1:]), strict=True):
        answer = client.chat.completions.create(model=name, messages=HELLO, n=2)
        assert (answer.model, [choice.message.content for choice in answer.choices]) == (name, ["ab", "ab"])
        chunks = list(client.chat.completions.create(model=name, messages=HELLO, stream=True))
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"
        text = client.completions.create(model=name, prompt=["x", "y"])
        assert (text.model, [choice.text for choice in text.choices]) == (name, ["x", "y"])
        assert service.adapters == [adapter] * 5
        service.adapters.clear()


@pytest.mark.parametrize(("name", "adapters"), [("parrot", []), ("new", ["parrot"]), ("new", ["new"]), ("n", "aa")])
def test_nobody_takes_anothers_name(name, adapters):
    models = Models()
    first = models.add("parrot", FakeService())
    with pytest.raises(UsageError, match="are called"):
        models.add(name, adapters=adapters)
    assert models.find("parrot") is first


def test_they_are_listed_with_the_model_that_has_them(client):
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["other", *NAMES]
    assert [(model.parent, model.root) for model in listed.values()] == [
        (None, "other"),
        (None, "parrot"),
        ("parrot", "parrot"),
        ("parrot", "parrot"),
    ]
    assert client.models.retrieve("org/du-fu") == listed["org/du-fu"]
    assert {listed[name].max_model_len for name in NAMES} == {2048}
    assert {listed[name].tools for name in NAMES} == {True}
    assert listed["other"].tools is False


def test_other_names_are_refused_with_all_that_there_are(client):
    with pytest.raises(openai.NotFoundError, match="give one of other, parrot, li-bai, org/du-fu"):
        client.chat.completions.create(model="du-fu", messages=HELLO)


def test_an_adapter_is_as_its_model_is(http, service):
    tokens = http.post("/tokenize", json={"model": "li-bai", "messages": HELLO}).json()
    assert tokens == http.post("/tokenize", json={"model": "parrot", "messages": HELLO}).json()
    assert http.post("/sleep", params={"model": "li-bai"}).json() == {"is_sleeping": True}
    assert service.state == "asleep"
    assert http.get("/is_sleeping", params={"model": "parrot"}).json() == {"is_sleeping": True}
    refused = http.post("/v1/chat/completions", json={"model": "org/du-fu", "messages": HELLO})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503,
        "the model org/du-fu sleeps: POST /wake_up first",
    )
    http.post("/wake_up")
    assert {http.get(f"/v1/models/{name}").json()["state"] for name in NAMES} == {"ready"}
    # The model moves once.
    assert set(http.post("/move", params={"device": "cuda:1"}).json()) == {"other", "parrot"}


def test_metrics_count_requests_by_the_name_and_the_engine_once(http, service):
    for name in ("li-bai", "li-bai", "parrot"):
        http.post("/v1/completions", json={"model": name, "prompt": "abc"})
    until(lambda: service.running == 0)
    families = text_string_to_metric_families(http.get("/metrics").text)
    found = {
        (sample.name, sample.labels.get("model_name")): sample.value for each in families for sample in each.samples
    }
    assert found["warpbus:prompt_tokens_total", "li-bai"] == 6
    assert found["warpbus:prompt_tokens_total", "parrot"] == 3
    assert ("warpbus:prompt_tokens_total", "org/du-fu") not in found
    assert {model for name, model in found if name == "warpbus:num_preemptions_total"} == {"other", "parrot"}


def test_they_load_and_close_with_their_model():
    models, service = Models(), FakeService()
    closed = []

    async def close(*, drain):
        closed.append(drain)

    service.close = close
    loading = models.add("slow", adapters=["li-bai"])
    with Running(models, ServerOptions()) as running, running.http() as http:
        assert http.get("/v1/models/li-bai").json()["state"] == "starting"
        asked = {"model": "li-bai", "messages": HELLO}
        refused = http.post("/v1/chat/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
        loading.loaded(service)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/chat/completions", json=asked).status_code == 200
        assert service.adapters == ["li-bai"]
    assert len(closed) == 1


@pytest.fixture
def loading(service, tmp_path):
    """A server that may load adapters from a directory."""
    root = tmp_path / "adapters"
    for name in ("li-bai", "damaged"):
        (root / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "file").write_text("")
    models = Models()
    models.add("parrot", service)
    with Running(models, ServerOptions(adapter_dirs=(str(root),))) as running, running.http() as http:
        http.root = root
        yield http


def load(http, name="poet", path="li-bai", **fields):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(http, name="poet"):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def say(http, name):
    return http.post("/v1/chat/completions", json={"model": name, "messages": HELLO})


def test_adapters_come_and_go(loading, service):
    assert say(loading, "poet").status_code == 404
    loaded = load(loading)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert service.loaded == {"poet": str(loading.root / "li-bai")}
    listed = loading.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("parrot", None), ("poet", "parrot")]
    assert say(loading, "poet").status_code == 200
    assert service.adapters[-1] == "poet"
    again = load(loading)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    gone = unload(loading)
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert service.loaded == {}
    assert say(loading, "poet").status_code == 404
    assert load(loading, path=str(loading.root / "li-bai")).status_code == 200


@pytest.mark.parametrize("path", ["none", "../secret", "link", "file", "/etc", "li-bai/../../secret", "a\0b"])
def test_adapters_come_from_allowed_directories_only(loading, service, path):
    refused = load(loading, path=path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_not_found")
    assert service.loaded == {}


def test_without_allowed_directories_none_is_loaded(http, tmp_path):
    refused = load(http, path=str(tmp_path), model="parrot")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapters_not_allowed")
    with pytest.raises(UsageError, match="--adapter-dir"):
        ServerOptions(adapter_dirs=(str(tmp_path / "none"),))


def test_what_cannot_be_loaded_is_not_served(loading, service):
    damaged = load(loading, path="damaged")
    assert damaged.status_code == 400
    assert damaged.json()["error"]["message"] == "lora_path: damaged: adapter_config.json is damaged"
    assert say(loading, "poet").status_code == 404
    assert load(loading, name="").status_code == 400
    assert load(loading, name="parrot").status_code == 400
    assert load(loading, model="none").status_code == 404
    load(loading)
    assert load(loading, name="other", model="poet").status_code == 400
    assert unload(loading, "parrot").status_code == 400
    assert unload(loading, "none").status_code == 404
    service.running = 1
    assert unload(loading).status_code == 409
    service.running = 0
    assert say(loading, "poet").status_code == 200
