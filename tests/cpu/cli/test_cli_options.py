"""Options that come from the fields of dataclasses: none is missing, none is there twice, and the help has defaults."""

import json
import re
from collections import Counter
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from warpbus.bench.options import (
    ParallelBenchOptions,
    PoolBenchOptions,
    QuantizeBenchOptions,
    RunOptions,
    ServingBenchOptions,
    TrainBenchOptions,
)
from warpbus.cli import app
from warpbus.cli.options import FieldOption, options_of, parse_numbers
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import UsageError
from warpbus.pool.daemon.options import PoolOptions
from warpbus.quantization.options import QuantizationOptions
from warpbus.server.options import ServerOptions
from warpbus.train.options import TrainingOptions

# The fields that no option of a command fills, or that the command computes from options of its own.
INTERNAL: dict[tuple[str, type], set[str]] = {
    ("quantize", QuantizationOptions): set(),
    ("train", TrainingOptions): {"dtype", "final_rate"},
    ("serve", ServerOptions): {"api_keys", "max_schema_bytes", "body_timeout", "heartbeat"},
    ("serve", ServiceOptions): {"max_restarts", "adapters"},
    ("serve", ReplicaOptions): set(),
    ("chat", SamplingParams): {
        *("stop", "ignore_eos", "min_p", "presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids"),
        *(
            "logprobs",
            "prompt_logprobs",
            "logprob_tokens",
            "logit_bias",
            "grammar",
            "thinking",
            "include_stop_str_in_output",
            "priority",
            "continues_text",
        ),
        "pooling",
    },
    ("chat", ServiceOptions): {
        *("max_num_seqs", "max_queue", "cache_tokens", "max_num_batched_tokens", "prefix_caching", "speculation"),
        *(
            "kv_host_memory",
            "kv_disk",
            "kv_disk_size",
            "inter_token_latency",
            "max_restarts",
            "watchdog_timeout",
            "adapters",
            "tensor_parallel",
            "expert_parallel",
            "cluster",
        ),
    },
    ("pool serve", PoolOptions): {
        *("peer_token", "max_unfinished", "max_unfinished_of_address", "max_asking", "handshake_timeout"),
        "idle_timeout",
    },
    ("pool dashboard", ServerOptions): {
        *("port", "api_keys", "share_prefixes", "allow_origins", "max_body_bytes", "max_n", "max_tokens"),
        *("max_schema_bytes", "max_connections", "request_timeout", "body_timeout", "heartbeat", "shutdown_timeout"),
        *("strict", "max_stored_responses", "adapter_dirs", "log_format", "otlp_endpoint", "root_path"),
    },
    ("bench quantize", QuantizeBenchOptions): set(),
    ("bench serving", ServingBenchOptions): set(),
    ("bench parallel", ParallelBenchOptions): set(),
    ("bench train", TrainBenchOptions): set(),
    ("bench pool", PoolBenchOptions): set(),
    ("bench decode", RunOptions): set(),
}


def command_of(name: str) -> Any:
    found: Any = typer.main.get_command(app)
    for word in name.split():
        found = found.commands[word]
    return found


def field_options(command: Any) -> dict[str, tuple[type, str]]:
    """The class and the field of each option of a command."""
    found: dict[str, tuple[type, str]] = command.callback.__wrapped__.field_options
    return found


@pytest.mark.parametrize(("name", "options"), INTERNAL, ids=lambda each: getattr(each, "__name__", each))
def test_each_field_has_one_option_with_its_default(name: str, options: type) -> None:
    command = command_of(name)
    targets = {option: field for option, (source, field) in field_options(command).items() if source is options}
    internal = INTERNAL[name, options]
    assert Counter(targets.values()) == Counter(each.name for each in fields(options) if each.name not in internal)
    assert internal <= {each.name for each in fields(options)}
    by_name = {option.name: option for option in command.params}
    text = " ".join(
        CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output.split()
    )
    text = re.sub(r"(?<=\w)- (?=\w)", "-", text)  # a line may end at a hyphen
    for option, field in targets.items():
        assert f"{by_name[option].opts[0]} " in text
        default = by_name[option].default
        if default is not None and not isinstance(default, bool):
            assert f"[default: {default}]" in text or f"[default: {default}; " in text, field


COMMANDS = sorted({name for name, _ in INTERNAL})
# Options whose default is not that of the field: they suit a conversation, or depend on other options of training.
OWN_DEFAULTS = {
    "chat": {"temperature", "top_p", "top_k", "repetition_penalty", "max_tokens"},
    "train": {"epochs", "rows", "rows_at_once", "learning_rate", "weight_decay"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_is_that_of_the_field(name: str) -> None:
    command = command_of(name)
    differing = set()
    for option in command.params:
        if option.name in field_options(command):
            source, field_name = field_options(command)[option.name]
            (field,) = [each for each in fields(source) if each.name == field_name]
            computed = field.default is MISSING or isinstance(field.default, tuple)
            if option.default != (None if computed else field.default):
                differing.add(option.name)
    assert differing == OWN_DEFAULTS.get(name, set())


@dataclass(frozen=True)
class Paint:
    """What the command below fills."""

    colors: tuple[str, ...] = ("red",)
    layers: tuple[int, ...] = ()
    opacity: float = 0.5
    memory: str | int | None = None
    glossy: bool = False
    dry: bool = True
    coats: int = 1

    least: ClassVar[dict[str, int]] = {"opacity": 0, "coats": 1}


@options_of(
    {"paint": Paint},
    color=FieldOption("one color", field="colors"),
    title=...,
    layers="numbers of layers",
    opacity="how opaque",
    memory="how much",
    glossy="with gloss",
    dry="wait",
    coats=FieldOption("number of coats", least=2, default=None),
)
def paint(
    wall: Annotated[Path, typer.Argument()], paint: dict[str, Any], title: str = "none", as_json: bool = False
) -> None:
    """Paint WALL."""
    print(json.dumps({"wall": str(wall), "title": title, "json": as_json, "given": paint, **asdict(Paint(**paint))}))


def painted(*words: str) -> Any:
    single = typer.Typer()
    single.command()(paint)
    return CliRunner().invoke(single, ["wall", *words])


def test_without_options_the_fields_have_their_defaults() -> None:
    found = json.loads(painted().stdout)
    assert found["given"] == {"opacity": 0.5, "glossy": False, "dry": True}
    assert found["colors"] == ["red"]
    assert found["coats"] == 1


def test_values_reach_the_fields() -> None:
    words = ["--color", "blue", "--color", "green", "--layers", "3,1,3", "--opacity", "0.25", "--memory", "6GB"]
    words += ["--glossy", "--no-dry", "--coats", "2", "--title", "a", "--as-json"]
    found = json.loads(painted(*words).stdout)
    assert (found["colors"], found["layers"], found["opacity"]) == (["blue", "green"], [1, 3], 0.25)
    assert (found["memory"], found["glossy"], found["dry"], found["coats"]) == ("6GB", True, False, 2)
    assert (found["wall"], found["title"], found["json"]) == ("wall", "a", True)


@pytest.mark.parametrize("words", [("--opacity", "-1"), ("--coats", "1"), ("--no-glossy",)])
def test_values_below_the_limit_and_unknown_flags_are_refused(words: tuple[str, ...]) -> None:
    """The limit of opacity is the field's, that of coats the option's; a switch that is off has one flag."""
    found = painted(*words)
    assert found.exit_code == 2
    assert words[0] in found.output


def test_the_help_lists_the_options_in_their_order() -> None:
    text = painted("--help").output
    places = [text.index(flag) for flag in ("--color", "--title", "--layers", "--opacity", "--coats", "--as-json")]
    assert places == sorted(places)
    assert "Paint WALL." in text


def test_an_option_for_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(LookupError, match="size"):
        options_of({"paint": Paint}, size="how large")(paint)


def test_whole_numbers() -> None:
    assert parse_numbers("gpus", "4,1,2,2", int) == (1, 2, 4)
    for text in ("", "1,x", "-1", "1.5", "²"):
        with pytest.raises(UsageError, match=f"--gpus {text}: expected whole numbers separated by commas"):
            parse_numbers("gpus", text, int)


def test_positive_numbers() -> None:
    assert parse_numbers("rates", "0.5,0.25,0.5", float) == (0.25, 0.5)
    for text in ("", "1,x", "0", "-1", "inf", "nan"):
        with pytest.raises(UsageError, match=r"--rates .*: expected positive numbers separated by commas"):
            parse_numbers("rates", text, float)


@dataclass
class Store:
    """What the command below fills."""

    kv_dtype: str = "auto"
    kv_disk: str | None = None
    restart: bool = False


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("kv_dtype is 'int3': give auto", "--kv-cache-dtype is 'int3': give auto"),
        ("kv_disk: /data/kv_disk/a.kv_disk cannot be made", "--kv-disk: /data/kv_disk/a.kv_disk cannot be made"),
        (
            "no restart: start over with restart=True, or give kv_disk=d",
            "no restart: start over with --restart, or give --kv-disk d",
        ),
    ],
)
def test_messages_name_options_in_place_of_fields(raised: str, shown: str) -> None:
    @options_of(
        {"store": Store}, kv_cache_dtype=FieldOption("dtype", field="kv_dtype"), kv_disk="where", restart="anew"
    )
    def keep(store: dict[str, Any]) -> None:
        raise UsageError(raised)

    with pytest.raises(UsageError) as error:
        keep(kv_cache_dtype="auto", kv_disk=None, restart=False)
    assert str(error.value) == shown
