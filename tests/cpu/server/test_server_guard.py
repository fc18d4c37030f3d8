"""Who is let in: keys, Host and Origin, CORS, ids, and what the log tells."""

import logging

import pytest
from serving_fakes import FakeService, Running

from warpbus.errors import UsageError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

KEYS = ("first-key-1", "second-key-2")
CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "a secret"}]}


@pytest.fixture(scope="module")
def guarded():
    models = Models()
    models.add("parrot", FakeService())
    options = ServerOptions(api_keys=KEYS, allow_origins=("https://friend.example",), allowed_hosts=("My-Name",))
    with Running(models, options) as running:
        yield running


@pytest.fixture(scope="module")
def http(guarded):
    with guarded.http() as http:
        yield http


def key(text):
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("good", KEYS)
def test_each_key_is_let_in(guarded, good):
    assert guarded.openai(good).models.list().data[0].id == "parrot"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        key("first-key-"),
        key("first-key-11"),
        key("x"),
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/parrot"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/move?device=cuda:1"),
        ("GET", "/is_sleeping"),
        ("GET", "/nothing"),
        ("GET", "/health/"),
        ("GET", "/%2e%2e/health"),
    ],
)
def test_nothing_else_is(http, method, path, headers):
    response = http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_key_that_is_no_ascii_is_wrong(http):
    assert http.get("/version", headers={"authorization": "Bearer ключ".encode()}).status_code == 401


def test_health_and_the_page_need_no_key(http):
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/").status_code == 200
    assert http.get("/page/../v1/models").status_code in (401, 404)


def test_below_the_path_of_a_proxy_all_is_as_without_it():
    models = Models()
    models.add("parrot", FakeService())
    with Running(models, ServerOptions(api_keys=KEYS, root_path="/llm")) as running, running.http() as http:
        for prefix in ("", "/llm"):
            assert http.get(f"{prefix}/health").status_code == 200
            assert "<title>" in http.get(f"{prefix}/").text
            assert http.get(f"{prefix}/v1/models").status_code == 401
            answer = http.post(f"{prefix}/v1/chat/completions", json=CHAT, headers=key(KEYS[0]))
            assert answer.json()["choices"][0]["message"]["content"]
        assert http.get("/llm").status_code == 200
        assert http.get("/llmx/health").status_code == 401
        assert http.get("/llm/llm/v1/models", headers=key(KEYS[0])).status_code == 404
        assert http.get("/llm/openapi.json", headers=key(KEYS[0])).json()["servers"] == [{"url": "/llm"}]


def salts_of(keys, asking, **options):
    """What the engine is asked with by requests that have these keys, one after the other."""
    models, service = Models(), FakeService()
    models.add("parrot", service)
    with Running(models, ServerOptions(api_keys=keys, **options)) as running, running.http() as http:
        for each in asking:
            for path, body in (("chat/completions", CHAT), ("completions", {"model": "parrot", "prompt": "a", "n": 2})):
                http.post(f"/v1/{path}", json=body, headers=key(each)).raise_for_status()
    return service.cache_salts


def test_keys_share_no_stored_prompts():
    first, *others = zip(*[iter(salts_of(KEYS, [*KEYS, *KEYS]))] * 3, strict=True)
    assert len(set(first)) == 1
    assert others[1] == first
    assert others[0] == others[2] != first
    assert b"" not in {*first, *others[0]}


@pytest.mark.parametrize(
    ("keys", "options"), [(KEYS, {"share_prefixes": True}), (KEYS[:1], {}), ((), {})], ids=["shared", "one", "none"]
)
def test_stored_prompts_are_shared_where_it_is_wanted_or_there_is_one_client(keys, options):
    assert set(salts_of(keys, keys or ("x",), **options)) == {b""}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.:1", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:8000", 200),
        ("my-name", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_other_hosts_are_refused_on_loopback(http, host, status):
    response = http.get("/health", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "host_not_allowed"


def test_pages_of_other_origins_may_not_post(http):
    with_key = key(KEYS[0])
    assert http.post("/sleep", headers={**with_key, "origin": "https://evil.example"}).status_code == 403
    assert http.post("/sleep", headers={**with_key, "origin": "null"}).status_code == 403
    friend = http.post("/wake_up", headers={**with_key, "origin": "https://friend.example"})
    assert friend.status_code == 200
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    own = http.post("/wake_up", headers={**with_key, "origin": str(http.base_url).rstrip("/")})
    assert own.status_code == 200


def test_browsers_may_ask_before_they_call(http):
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    friend = http.options("/v1/chat/completions", headers={"origin": "https://friend.example", **asking})
    assert friend.status_code == 200
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    stranger = http.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asking})
    assert "access-control-allow-origin" not in stranger.headers


def test_without_allowed_origins_there_are_no_cors_headers(served):
    with served.http() as http:
        response = http.get("/health", headers={"origin": "https://friend.example"})
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_request_ids_are_given_or_returned(http):
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    first, second = (http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert first.startswith("req-")
    strange = http.get("/health", headers={"x-request-id": "a b" * 100})
    assert strange.headers["x-request-id"].startswith("req-")


def test_the_log_tells_of_requests_but_not_what_they_say(http, caplog):
    with caplog.at_level(logging.INFO, "warpbus.access"):
        http.post("/v1/chat/completions", json=CHAT, headers={**key(KEYS[0]), "x-request-id": "id-1"})
        http.get("/v1/models", headers=key("wrong-key-3"))
        http.get("/x%0Ay%20z")
    lines = [record.getMessage() for record in caplog.records if record.name == "warpbus.access"]
    assert lines[0].startswith("127.0.0.1 POST /v1/chat/completions 200 id=id-1 model=parrot prompt=")
    assert "output=9 ttft=0." in lines[0]
    assert " 401 " in lines[1]
    assert r"/x\ny%20z 401" in lines[2]
    assert not any(word in line for line in lines for word in ("secret", *KEYS, "wrong-key-3"))
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "0.0.0.0"}, "--insecure"),
        ({"host": "::"}, "--insecure"),
        ({"host": "192.168.1.5", "api_keys": KEYS}, "--insecure"),
        ({"host": "example.com"}, "--insecure"),
        ({"ssl_certfile": "a"}, "go together"),
        ({"api_keys": ("short",)}, "8 or more"),
        ({"api_keys": ("with space",)}, "8 or more"),
        ({"allow_origins": ("friend.example",)}, "--allow-origin"),
        ({"allow_origins": ("https://friend.example/",)}, "--allow-origin"),
        ({"allow_origins": ("*",)}, "--api-key"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/llm/"}, "--root-path"),
        ({"port": 70000}, "--port"),
        ({"max_n": 0}, "--max-n"),
        ({"request_timeout": 0.0}, "--request-timeout"),
    ],
)
def test_options_that_would_open_it_or_make_no_sense_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        ServerOptions(**fields)


def test_a_server_for_others_has_keys_and_tls_or_says_insecure():
    assert not ServerOptions(host="0.0.0.0", insecure=True).loopback
    assert ServerOptions(host="0.0.0.0", api_keys=KEYS, ssl_certfile="a", ssl_keyfile="b").tls
    assert all(ServerOptions(host=host).loopback for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"))
    assert "first" not in repr(ServerOptions(api_keys=KEYS))
