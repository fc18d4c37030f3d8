"""Models by name: from a hub on this machine, over every kind of break, to a directory; and then without the hub."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hub_standin
import huggingface_hub
import pytest
from hub_standin import StandIn
from huggingface_hub import constants

from warpbus.errors import CheckpointError, DownloadError, StorageError, UsageError
from warpbus.formats import files as formats_files
from warpbus.formats.hub import ModelName, Pulled, find_model, finding, parse_name, pull

NAME = "THUDM/small-glm"
WEIGHTS = random.Random(1).randbytes(3_000_000)
FILES = {
    "config.json": b'{"model_type": "glm"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/more/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/tool_use.py": b"raise SystemExit",
    "MODEL_LICENSE": b"as you like",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same again",
    "modeling_chatglm.py": b"raise SystemExit",
    "tokenization_chatglm.py": b"raise SystemExit",
    "README.md": b"# a model",
    "onnx/model.safetensors": b"for others",
}
WANTED = ["MODEL_LICENSE", "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"]
WANTED += ["model.safetensors", "tokenizer.json", "tokenizer_config.json"]
SMALL_CHUNKS = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 100_000"


def content(directory: Path) -> dict[str, bytes]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def blobs(home: Path) -> list[Path]:
    return sorted((home / "hf/hub/models--THUDM--small-glm/blobs").iterdir())


def test_an_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(UsageError, match=r"^the model's name is empty: give a directory, a name on a hub, or demo$"):
        find_model("")


def test_what_is_needed_comes_and_then_the_hub_is_not_asked_again(hub: StandIn, home: Path) -> None:
    commit = hub.add(NAME, FILES)
    reported: list[tuple[int, int]] = []
    directory = find_model(NAME, progress=lambda done, total: reported.append((done, total)))
    assert sorted(content(directory)) == WANTED
    assert all(found == FILES[name] for name, found in content(directory).items())
    assert directory == home / "hf/hub/models--THUDM--small-glm/snapshots" / commit
    size = sum(len(FILES[name]) for name in WANTED)
    assert reported[-1] == (sum(len(FILES[name]) for name in set(WANTED) - {"tokenizer_config.json"}), reported[0][1])
    assert reported[0][1] == size - len(FILES["tokenizer_config.json"])  # its content is that of another file
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    hub.asked.clear()
    assert find_model(NAME) == find_model(f"{NAME}@main") == find_model(f"{NAME}@{commit}") == directory
    assert hub.asked == []


def test_huggingfaces_own_programs_find_it(hub: StandIn, home: Path) -> None:
    hub.add(NAME, FILES)
    directory = find_model(NAME)
    cache = home / "hf/hub"
    assert huggingface_hub.try_to_load_from_cache(NAME, "config.json", cache_dir=cache) == str(
        directory / "config.json"
    )
    found = huggingface_hub.snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    assert Path(found) == directory


def test_what_huggingfaces_own_programs_have_brought_is_found(hub: StandIn, home: Path) -> None:
    hub.add(NAME, FILES)
    cache = home / "hf/hub"
    asked = {"cache_dir": cache, "endpoint": hub.url, "token": False}
    huggingface_hub.hf_hub_download(NAME, "config.json", **asked)
    with pytest.raises(
        DownloadError, match=r"small-glm: is not on this disk: get it with `warpbus pull THUDM/small-glm`"
    ):
        find_model(NAME, download=False)
    found = huggingface_hub.snapshot_download(NAME, allow_patterns=["config.json", "*.safetensors"], **asked)
    hub.asked.clear()
    assert find_model(NAME) == Path(found)
    assert hub.asked == []
    pulled = pull(NAME)
    assert pulled.directory == Path(found)
    assert sorted(content(pulled.directory)) == sorted([*WANTED, "onnx/model.safetensors"])
    assert pulled.downloaded < 1000  # the weights were there


def test_shards_come_as_the_index_names_them(hub: StandIn) -> None:
    index = {"weight_map": {"a": "part-1.bin", "b": "part-2.bin", "c": "part-1.bin"}}
    files = {
        "config.json": b"{}",
        "ice_text.model": b"vocabulary",
        "pytorch_model.bin.index.json": json.dumps(index).encode(),
        "part-1.bin": b"one" * 1000,
        "part-2.bin": b"two" * 1000,
        "part-3.bin": b"of something else",
    }
    hub.add(NAME, files)
    directory = find_model(NAME)
    assert content(directory) == {name: found for name, found in files.items() if name != "part-3.bin"}
    (directory / "part-2.bin").unlink()
    with pytest.raises(DownloadError, match="is not on this disk"):
        find_model(NAME, download=False)
    assert find_model(NAME) == directory
    assert content(directory)["part-2.bin"] == files["part-2.bin"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../part-1.bin"}}, r"names the file '\.\./part-1\.bin'"),
        ({"weight_map": {"a": "part-9.bin"}}, r"part-9\.bin, named by pytorch_model\.bin\.index\.json, is not there"),
        ({"weight_map": 3}, "expected an object weight_map"),
        ([], "expected a JSON object"),
    ],
)
def test_an_index_that_is_wrong(hub: StandIn, index: Any, message: str) -> None:
    hub.add(NAME, {"config.json": b"{}", "pytorch_model.bin.index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match=message):
        find_model(NAME)


def test_a_cut_connection_is_gone_on_with(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    hub.cuts = [1_000_000, 0, 0, 700_000]
    assert content(find_model(NAME))["model.safetensors"] == WEIGHTS
    ranges = [asked.range for asked in hub.files_asked() if asked.path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=1000000-", "bytes=1000000-", "bytes=1000000-", "bytes=1700000-"]


def test_a_hub_that_brings_nothing_is_given_up_and_gone_on_with_later(hub: StandIn, home: Path) -> None:
    hub.add(NAME, FILES)
    hub.cuts = [1_000_000, *[0] * 6]
    with pytest.raises(DownloadError, match=r"small-glm: the connection to 127.* failed .* continues where this one"):
        find_model(NAME)
    hub.cuts.clear()
    partial = next(file for file in blobs(home) if file.name.endswith(".incomplete"))
    assert partial.read_bytes() == WEIGHTS[:1_000_000]
    hub.asked.clear()
    reported: list[int] = []
    pulled = pull(NAME, progress=lambda done, total: reported.append(done))
    assert [asked.range for asked in hub.files_asked() if "safetensors" in asked.path] == ["bytes=1000000-"]
    assert reported[0] > 0
    assert pulled.downloaded <= 2_001_000
    assert (pulled.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert not any(file.name.endswith(".incomplete") for file in blobs(home))


def test_a_process_that_was_killed_is_followed_by_one_that_goes_on(hub: StandIn, home: Path) -> None:
    hub.add(NAME, FILES)
    hub.gate.clear()
    command = [sys.executable, "-c", f"{SMALL_CHUNKS}; from warpbus.formats.hub import pull; pull({NAME!r})"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 300
    partial = hashlib.sha256(WEIGHTS).hexdigest() + ".warpbus.incomplete"
    path = home / "hf/hub/models--THUDM--small-glm/blobs" / partial
    try:
        while not path.exists() or path.stat().st_size <= 1_000_000:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with pytest.raises(DownloadError, match="is not on this disk"):
        find_model(NAME, download=False)
    hub.gate.set()
    hub.asked.clear()
    directory = find_model(NAME)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    (asked,) = [asked for asked in hub.files_asked() if asked.path.endswith("model.safetensors")]
    assert asked.range is not None
    assert int(asked.range.removeprefix("bytes=")[:-1]) > 1_000_000


def test_a_hub_without_parts_begins_anew(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    hub.ranges, hub.cuts = False, [1_000_000]
    reported: list[tuple[int, int]] = []
    directory = find_model(NAME, progress=lambda done, total: reported.append((done, total)))
    assert content(directory)["model.safetensors"] == WEIGHTS
    assert reported[-1][0] == reported[-1][1]


def test_a_part_that_was_damaged_is_not_used(hub: StandIn, home: Path) -> None:
    hub.add(NAME, FILES)
    hub.cuts = [1_000_000, *[0] * 6]
    with pytest.raises(DownloadError):
        find_model(NAME)
    hub.cuts.clear()
    partial = next(file for file in blobs(home) if file.name.endswith(".incomplete"))
    partial.write_bytes(b"\0" * 500_000)
    with pytest.raises(DownloadError, match="does not have the SHA-256 that it lists, so it was not kept"):
        find_model(NAME)
    assert not partial.exists()
    assert content(find_model(NAME))["model.safetensors"] == WEIGHTS


def test_bytes_with_another_hash_are_not_kept(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    name = "model.safetensors"
    hub.wrong = {name}
    with pytest.raises(DownloadError, match=f"{name}: what 127.0.0.1:.* sent does not have the SHA-256 that it lists"):
        find_model(NAME)
    with pytest.raises(DownloadError, match="is not on this disk"):
        find_model(NAME, download=False)
    hub.wrong = set()
    assert content(find_model(NAME))[name] == FILES[name]


def test_a_file_that_is_refused(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    hub.errors = [403] * 8
    with pytest.raises(
        DownloadError, match=r"THUDM/small-glm: 127.* answers 403: try again later, or use another source"
    ):
        find_model(NAME)


def test_what_the_hub_does_not_have_or_give(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    with pytest.raises(
        DownloadError, match=r"THUDM/other: there is no such directory, .* on 127.*: check the name; set HF_TOKEN"
    ):
        find_model("THUDM/other")
    with pytest.raises(DownloadError, match="THUDM/small-glm: has no revision v2 on 127"):
        find_model(f"{NAME}@v2")
    hub.gated = {NAME}
    with pytest.raises(DownloadError, match=r"is gated: accept its terms at http.*/THUDM/small-glm with your account"):
        find_model(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    with pytest.raises(DownloadError, match=r"is gated: accept its terms at .* with the token's account"):
        find_model(NAME)
    with pytest.raises(
        DownloadError, match=r"no such model on 127.*: check the name; the token's account may not see it"
    ):
        find_model("THUDM/other")
    hub.add("THUDM/empty", {"README.md": b"soon"})
    with pytest.raises(DownloadError, match=r"THUDM/empty: has no config\.json"):
        find_model("THUDM/empty")
    hub.add("THUDM/empty", {"config.json": b"{}", "model.gguf": b"other"})
    with pytest.raises(DownloadError, match=r"has no model\.safetensors or pytorch_model\.bin"):
        find_model("THUDM/empty")


def test_a_listing_that_leads_elsewhere(hub: StandIn, home: Path) -> None:
    hub.add(NAME, {**FILES, "../../../escaped.json": b"{}"})
    assert sorted(content(find_model(NAME))) == WANTED
    assert not list(home.rglob("escaped.json"))


@pytest.mark.parametrize(
    "listed",
    [
        {"size": 10**400, "blobId": "0" * 40},
        {"size": "3", "blobId": "0" * 40},
        {"size": 3, "blobId": "../../refs/main"},
        {"size": 3},
        {"size": 3, "blobId": "0" * 40, "lfs": {"sha256": "../../refs/main", "size": 3, "pointerSize": 1}},
        {"size": 3, "blobId": "0" * 40, "lfs": {"size": 3}},
    ],
)
def test_a_listing_that_no_hub_makes(hub: StandIn, monkeypatch: pytest.MonkeyPatch, listed: dict[str, Any]) -> None:
    hub.add(NAME, FILES)
    monkeypatch.setattr(hub_standin, "_sibling", lambda name, content: {"rfilename": name, **listed})
    with pytest.raises(DownloadError, match=r"127.*: does not answer as a hub does \(.*\): check HF_ENDPOINT"):
        find_model(NAME)
    assert hub.files_asked() == []


def test_the_token_opens_private_models_and_goes_nowhere_else(
    hub: StandIn, home: Path, set_endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandIn() as cdn:
        for host in (hub, cdn):
            host.add(NAME, FILES)
        hub.token, hub.cdn = "hf_abc", cdn
        with pytest.raises(DownloadError, match="set HF_TOKEN if it is private"):
            find_model(NAME)
        monkeypatch.setenv("HF_TOKEN", "hf_abc")
        cdn.cuts = [500_000]
        assert content(find_model(NAME))["model.safetensors"] == WEIGHTS
        assert {asked.token for asked in hub.asked[3:]} == {"Bearer hf_abc"}
        streamed = [(asked.token, asked.range) for asked in cdn.files_asked()]
        assert streamed == [(None, None), (None, "bytes=500000-")]
        monkeypatch.delenv("HF_TOKEN")
        (home / "hf/token").write_text("hf_abc\n")
        assert pull(NAME).downloaded == 0
        set_endpoint("http://mirror.invalid")
        with pytest.raises(UsageError, match="a token would be sent unencrypted"):
            pull(NAME)


@pytest.mark.parametrize("address", ["http://[", f"http://{'a' * 70}.invalid", "file:///etc"])
def test_redirects_to_nowhere(hub: StandIn, address: str) -> None:
    hub.add(NAME, FILES)
    hub.cdn = SimpleNamespace(url=address)  # type: ignore[assignment]
    with pytest.raises(DownloadError, match=r"small-glm: the connection to 127.* failed"):
        find_model(NAME)


def test_what_the_configuration_speaks_against_is_not_brought(hub: StandIn) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    sharded = {"model.safetensors.index.json": index, "model-1.safetensors": WEIGHTS, "config.json": b'{"a": 1}'}
    hub.add(NAME, FILES)
    hub.add(NAME, sharded, "sharded")

    def refuse(config: dict[str, Any]) -> None:
        raise UsageError(f"{config}: another one is wanted")

    for name, config in ((NAME, "{'model_type': 'glm'}"), (f"{NAME}@sharded", "{'a': 1}")):
        with pytest.raises(UsageError, match=f"^{name}: {config}: another one is wanted$"):
            find_model(name, check=refuse)
    assert [asked.path.rpartition("/")[2] for asked in hub.files_asked()] == ["config.json"] * 2
    asked: list[dict[str, Any]] = []
    assert sorted(content(find_model(NAME, check=asked.append))) == WANTED
    assert find_model(NAME, check=refuse) == find_model(NAME)  # what is on the disk says so when it is loaded
    assert asked == [{"model_type": "glm"}]
    for damaged in (b"[]", b"{"):
        hub.add(NAME, {**FILES, "config.json": damaged}, "damaged")
        with pytest.raises(CheckpointError, match=r"config\.json is no JSON object: the repository is damaged"):
            find_model(f"{NAME}@damaged", check=asked.append)


def test_pull_asks_what_is_new(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    first = find_model(NAME)
    second = hub.add(NAME, {**FILES, "config.json": b'{"model_type": "glm4"}'})
    assert find_model(NAME) == first
    pulled = pull(NAME)
    assert pulled == Pulled(ModelName("huggingface", NAME), second, pulled.directory, 7, pulled.nbytes, 22)
    assert find_model(NAME) == pulled.directory != first
    assert content(first)["config.json"] == FILES["config.json"]


def test_a_full_disk_is_noticed_before(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    monkeypatch.setattr(formats_files, "free_space", lambda path: 1_000_000)
    with pytest.raises(StorageError, match=r"disk full: needs at least 3\.0 MB, 1\.0 MB free"):
        find_model(NAME)
    assert not any(asked.path.endswith("safetensors") for asked in hub.files_asked())


def test_no_network(home: Path, set_endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with StandIn() as gone:
        set_endpoint(gone.url)
    with pytest.raises(DownloadError, match=r"the connection to 127\.0\.0\.1:\d+ failed \(.*Connection refused\)"):
        find_model(NAME)
    for address in ("ftp://hub", "http://["):
        set_endpoint(address)
        with pytest.raises(UsageError, match=r"expected an address such as https://huggingface\.co"):
            find_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        find_model(NAME)


def test_a_model_on_the_disk_needs_no_network(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, FILES)
    directory = find_model(NAME)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(NAME) == directory
    assert hub.asked == []


def test_modelscope(hub: StandIn, home: Path) -> None:
    pytest.importorskip("modelscope_hub")
    hub.add(NAME, FILES, "master")
    hub.cuts = [1_000_000]
    with pytest.raises(DownloadError, match="is not on this disk"):
        find_model(f"modelscope:{NAME}", download=False)
    reported: list[tuple[int, int]] = []
    directory = find_model(f"modelscope:{NAME}", progress=lambda done, total: reported.append((done, total)))
    assert sorted(content(directory)) == WANTED
    assert content(directory)["model.safetensors"] == WEIGHTS
    assert reported == [(sum(len(FILES[name]) for name in WANTED),) * 2]
    assert home / "modelscope" in directory.parents
    ranges = [asked.range for asked in hub.files_asked() if "FilePath=model.safetensors" in asked.path]
    assert ranges == [None, "bytes=1000000-"]
    hub.asked.clear()
    assert find_model(NAME, source="modelscope") == directory
    assert hub.asked == []
    pulled = pull(f"modelscope:{NAME}@master")
    assert (pulled.directory, pulled.downloaded) == (directory, 0)
    assert pulled.to_json()["source"] == "modelscope"
    with pytest.raises(DownloadError, match=r"modelscope:THUDM/other: there is no such model or revision on 127"):
        find_model("modelscope:THUDM/other")
    hub.wrong = {"tokenizer.json"}
    hub.add(NAME, {**FILES, "tokenizer.json": b'{"a": 1}'}, "v2")
    with pytest.raises(
        DownloadError, match=r"modelscope:THUDM/small-glm@v2: tokenizer\.json: 127.* did not deliver it"
    ):
        find_model(f"modelscope:{NAME}@v2")


def test_modelscope_notices_what_has_changed(hub: StandIn) -> None:
    pytest.importorskip("modelscope_hub")
    hub.add(NAME, FILES, "master")
    directory = find_model(f"modelscope:{NAME}")
    hub.add(NAME, {**FILES, "config.json": b'{"model_type": "glm4"}'}, "master")
    hub.asked.clear()
    assert pull(f"modelscope:{NAME}").directory == directory
    assert content(directory)["config.json"] == b'{"model_type": "glm4"}'
    assert ["config.json" in asked.path for asked in hub.files_asked() if "FilePath" in asked.path] == [True]


def test_modelscope_without_its_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'warpbus\[modelscope\]'"):
        find_model(f"modelscope:{NAME}")


def test_a_model_that_is_asked_for_twice_comes_once(hub: StandIn) -> None:
    hub.add(NAME, FILES)
    with ThreadPoolExecutor(2) as both:
        found = {asking.result() for asking in [both.submit(find_model, NAME) for _ in range(2)]}
    assert len(found) == 1
    assert content(found.pop())["model.safetensors"] == WEIGHTS
    assert len([asked for asked in hub.files_asked() if asked.path.endswith("model.safetensors")]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("THUDM/chatglm2-6b", ModelName("huggingface", "THUDM/chatglm2-6b")),
        ("THUDM/chatglm2-6b@v1.0", ModelName("huggingface", "THUDM/chatglm2-6b", "v1.0")),
        ("THUDM/chatglm2-6b@refs/pr/3", ModelName("huggingface", "THUDM/chatglm2-6b", "refs/pr/3")),
        ("huggingface:a/b", ModelName("huggingface", "a/b")),
        ("modelscope:ZhipuAI/chatglm2-6b@v1", ModelName("modelscope", "ZhipuAI/chatglm2-6b", "v1")),
        ("chatglm2-6b", None),
        ("./THUDM/chatglm2-6b", None),
        ("../chatglm2-6b", None),
        ("THUDM/..", None),
        ("/models/chatglm2-6b", None),
        ("models/THUDM/chatglm2-6b", None),
        ("a/b--c", None),
        ("a/b c", None),
    ],
)
def test_names_and_paths(text: str, expected: ModelName | None) -> None:
    assert parse_name(text) == expected
    if expected is not None:
        assert parse_name(str(expected)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "modelscope:../b"}, "is no name of a model"),
        ({"text": "modelscope:a"}, "is no name of a model"),
        ({"text": "./a/b", "revision": "main"}, "is no name of a model"),
        ({"text": "a/b@../main"}, r"'\.\./main' is no revision"),
        ({"text": "a/b@"}, "'' is no revision"),
        ({"text": "a/b@x/../y"}, "is no revision"),
        ({"text": "a/b", "revision": "-x"}, "is no revision"),
        ({"text": "a/b@x", "revision": "y"}, "names the revision 'x', but revision is 'y'"),
        ({"text": "modelscope:a/b", "source": "huggingface"}, "is on modelscope, but source is huggingface"),
        ({"text": "a/b", "source": "github"}, "source 'github' is not known: expected huggingface or modelscope"),
    ],
)
def test_names_that_are_none(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_name(**arguments)


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "THUDM/chatglm2-6b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("THUDM/chatglm2-6b") == Path("THUDM/chatglm2-6b")
    assert find_model(Path("not/there")) == Path("not/there")
    with pytest.raises(UsageError, match="is a path, or no name of a model"):
        pull("THUDM/chatglm2-6b")


def test_the_packaged_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model("demo").name == "glm-poet"
    assert (find_model("demo") / "config.json").exists()
    monkeypatch.setattr(finding, "_DEMO_DIRECTORY", tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the packaged demo is incomplete: install warpbus again"):
        find_model("demo")
