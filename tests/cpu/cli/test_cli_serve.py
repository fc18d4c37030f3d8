"""`warpbus serve`: what it refuses before anything is loaded, what it hands on, and what it says."""

import re

import pytest
import typer
from typer.testing import CliRunner

from warpbus.cli.serve import serve
from warpbus.errors import CheckpointError, DataError, UsageError
from warpbus.server import listening
from warpbus.server.listening import ModelToServe, bind
from warpbus.server.options import ServerOptions

app = typer.Typer()
app.command()(serve)


def invoke(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def calls(monkeypatch):
    """What would be served; nothing is."""
    found = []

    def keep(wanted, options, service, *, progress, ready, replicas):
        found.append((wanted, options, service, replicas))
        progress("a")(1, 2)
        ready("http://127.0.0.1:8000")

    monkeypatch.setattr(listening, "serve", keep)
    return found


def test_flags_reach_server_and_service(calls, tmp_path):
    (tmp_path / "keys").write_text("key-from-file-1\n\n key-from-file-2 \n")
    result = invoke(
        tmp_path / "some-model", "demo",
        *("--port", 9000, "--api-key", "key-from-flag", "--api-key-file", tmp_path / "keys", "--max-n", 3),
        *("--allow-origin", "https://a.example", "--allowed-host", "box", "--max-tokens", 77, "--shutdown-timeout", 5),
        *("--device", "cpu", "--dtype", "float32", "--max-model-len", 512, "--max-num-seqs", 5, "--max-queue", 6),
        *("--kv-cache-dtype", "int8", "--kv-cache-tokens", 999, "--no-prefix-caching"),
        *("--speculation", "mtp:4", "--tensor-parallel-size", 2, "--data-parallel-size", 3, "--expert-parallel"),
        env={"WARPBUS_API_KEY": "key-from-environment"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    [(wanted, options, service, replicas)] = calls
    assert [one.name for one in wanted] == ["some-model", "glm-poet"]
    assert wanted[0] == ModelToServe("some-model", tmp_path / "some-model", alias=str(tmp_path / "some-model"))
    assert wanted[1].alias == "demo"
    assert options.api_keys == ("key-from-flag", "key-from-file-1", "key-from-file-2", "key-from-environment")
    assert (options.port, options.max_n, options.max_tokens, options.shutdown_timeout) == (9000, 3, 77, 5.0)
    assert (options.allow_origins, options.allowed_hosts) == (("https://a.example",), ("box",))
    assert (service.device, service.dtype, service.max_model_len, service.kv_dtype) == ("cpu", "float32", 512, "int8")
    assert (service.max_num_seqs, service.max_queue, service.tensor_parallel) == (5, 6, 2)
    assert service.expert_parallel
    assert (service.cache_tokens, service.prefix_caching, service.speculation) == (999, False, "mtp:4")
    assert replicas.data_parallel == 3


def test_it_says_how_it_can_be_asked(calls):
    result = invoke("demo", env={"WARPBUS_API_KEY": "key-from-environment"})
    assert "ready at http://127.0.0.1:8000" in result.stderr
    assert re.search(
        r'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer \$WARPBUS_API_KEY"', result.stderr
    )
    assert '"model": "glm-poet"' in result.stderr
    assert "key-from-environment" not in result.output
    assert "Authorization" not in invoke("demo", env={"WARPBUS_API_KEY": ""}).stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("demo", "--host", "0.0.0.0"), UsageError, "--insecure"),
        (("demo", "demo"), UsageError, "two models are called glm-poet"),
        (("demo", "--served-model-name", "a", "--served-model-name", "b"), UsageError, "2 for 1 models"),
        (("demo", "--api-key-file", "no-such-file"), DataError, "no-such-file"),
        (("demo", "--max-num-seqs", "0"), UsageError, "--max-num-seqs"),
        (("demo", "--ssl-certfile", "a.pem"), UsageError, "go together"),
        (("demo", "--ssl-certfile", "a.pem", "--ssl-keyfile", "b.pem"), UsageError, "a.pem"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, error, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_names_can_be_given(calls):
    assert invoke("demo", "demo", "--served-model-name", "a", "--served-model-name", "b").exit_code == 0
    assert [(one.name, one.alias) for one in calls[0][0]] == [("a", None), ("b", None)]


def test_a_port_in_use_is_reported_before_a_model_is_loaded():
    with bind(ServerOptions(port=0)) as taken:
        result = invoke("demo", "--port", taken.getsockname()[1])
    assert isinstance(result.exception, UsageError)
    assert "already" in str(result.exception)


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")])
def test_the_url_can_be_opened_on_this_machine(host, shown):
    options = ServerOptions(host=host, port=0, insecure=True)
    with bind(options) as bound:
        assert listening.address(bound, options) == f"http://{shown}:{bound.getsockname()[1]}"


def test_a_model_that_is_not_there_ends_the_server(tmp_path):
    result = invoke(tmp_path / "none", "--port", 0)
    assert isinstance(result.exception, CheckpointError)
    assert "none" in str(result.exception)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    def without():
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.setattr("warpbus.cli.serve.permanent_objects", without)
    result = invoke("demo")
    assert isinstance(result.exception, UsageError)
    assert "pip install 'warpbus[serve]'" in str(result.exception)
