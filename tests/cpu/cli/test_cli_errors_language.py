"""Every error that a command can print has its Chinese: a message of the source without it fails the test."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import warpbus
from warpbus.language import CATALOGUE, Catalogue, read_catalogue

PACKAGE = Path(warpbus.__file__).parent
PLACEHOLDER = re.compile(r"\{\d+\}")
CODE = re.compile(r"`[^`]*`|'[^']*'|(?:warpbus|hf|pip)(?: [a-z0-9*/-]+)+")
SENTENCE = re.compile(r"[A-Za-z]*[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")  # three English words beside each other
VALUE = "\0"

# Messages that no command prints. HTTP answers are English, as OpenAI's are: their first argument is a status.
FOR_PROGRAMS = (
    "cuda/dtype_names.py",  # arguments of Python calls
    "cuda/green.py",
    "cuda/ipc.py",
    "cuda/staging.py",
    "cuda/tensor_map.py",
    "cuda/vmm.py",
    "cuda/vmm_driver.py",
    "dist/outcome.py",  # between processes of one job
    "engine/grammar.py",  # requests of a server
    "engine/kv_cache.py",
    "engine/moving.py",
    "engine/readback.py",
    "engine/service.py",
    "engine/serving_process.py",
    "engine/step_pipeline.py",
    "engine/structural_tags.py",
    "kernels/",
    "models/layers/",
    "pool/client/",  # a program whose GPU is remote
    "pool/protocol/",
    "pool/tenant/",
    "qtensor/qtensor.py",
    "train/loss.py",
)
FOR_USERS_TOO = ("address.py", "channel.py", "control_channel.py", "sockets.py")  # of pool/protocol


def printed(path: str) -> bool:
    return not path.startswith(FOR_PROGRAMS) or path in {f"pool/protocol/{name}" for name in FOR_USERS_TOO}


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {
        str(file.relative_to(PACKAGE)): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def errors() -> set[str]:
    """The names of WarpbusError and of all classes derived from it."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"WarpbusError"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def texts(node: ast.expr) -> list[str]:
    """The texts that an expression can be, with VALUE for the parts that are computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left) for right in texts(node.right)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return [VALUE]


def alternatives(node: ast.expr) -> Iterator[str]:
    """The words between which a message chooses: "a GPU" if ... else "a CPU" within its f-string."""
    for part in ast.walk(node):
        if isinstance(part, ast.FormattedValue):
            for inner in ast.walk(part.value):
                if isinstance(inner, ast.IfExp):
                    yield from texts(inner)


def numbered(text: str) -> str:
    """The text as the catalogue has it: {0}, {1}, ... for the values."""
    first, *others = text.split(VALUE)
    return first + "".join(f"{{{place}}}{other}" for place, other in enumerate(others))


def messages() -> dict[str, str]:
    """Where each message of an error is raised, by the message, and each sentence that fills one."""
    found: dict[str, str] = {}
    names = errors()
    for path, tree in sources().items():
        if not printed(path):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in names:
                parts = [text for text in alternatives(node.args[0]) if re.search("[a-z]{2,} [a-z]{2,}", text)]
                for text in [*texts(node.args[0]), *parts]:
                    if len(re.findall(r"[^\W\d_]", text)) >= 4:  # others are composed of messages
                        found[numbered(text.strip())] = f"{path}:{node.lineno}"
    return found


CHINESE = Catalogue(read_catalogue(CATALOGUE.read_text(encoding="utf-8")))


def test_every_error_has_its_chinese_with_all_of_its_values() -> None:
    found = messages()
    assert len(found) > 800
    wrong = {}
    for english, place in found.items():
        chinese = CHINESE.gettext(english)
        if sorted(PLACEHOLDER.findall(chinese)) != sorted(PLACEHOLDER.findall(english)):
            wrong[place] = f"{english} -> {chinese}"
        elif chinese == english or SENTENCE.search(CODE.sub("", chinese)):
            wrong[place] = f"no Chinese in {CATALOGUE.name}: {english} -> {chinese}"
    assert wrong == {}


def test_what_is_left_out_exists() -> None:
    for path in FOR_PROGRAMS:
        assert (PACKAGE / path).exists(), path


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("weights.gguf: key 'a' occurs twice", "weights.gguf：键 'a' 出现两次"),  # a place before a message
        (
            "3 GPUs: the model has 2 heads and an FFN of 64, sharded in multiples of 32: use at most 2 GPUs",
            "3 个 GPU：模型有 2 个头和大小为 64 的 FFN，按 32 的倍数切分：请至多使用 2 个 GPU",
        ),
        ("prog.cu: 编译器报错（第 1 行）", "prog.cu：编译器报错（第 1 行）"),  # a text that is Chinese already
        (
            "m/model.safetensors: damaged: its header is not a JSON object: download it again",
            "m/model.safetensors 已损坏：文件头不是 JSON 对象：请重新下载",
        ),
        (
            "temperature is 200: give a number from 0 to 100 (0 is greedy)",
            "temperature 为 200：请给出 0 至 100 的数（0 表示贪心）",
        ),
        (
            "prompt 0 has 14 tokens, the context holds 4 with the answer: shorten it or raise max_model_len",
            "提示词 0 有 14 个 token，上下文连同回答只能容纳 4 个：请缩短它或增大 max_model_len",
        ),
        (
            "m: is a file: expected the directory of an adapter, with adapter_config.json",
            "m：是一个文件：应为适配器的目录，含 adapter_config.json",
        ),
        (
            "o: 64 tokens in 27 s, loss 3.7236, validation 2.9144",
            "o：64 个 token，用时 27 秒，损失 3.7236，验证损失 2.9144",
        ),
        (
            "w4: 34.5 MB -> 13.5 MB in 1.1 s on cpu, peak memory 0.35 GB",
            "w4：34.5 MB -> 13.5 MB，用时 1.1 秒，设备 cpu，内存峰值 0.35 GB",
        ),
        (
            "down: NaN or infinity among its weights (1 in rows 0 to 127): use an undamaged checkpoint. The finished "
            "layers (1) are kept in o.quantization: once this is mended, the same command goes on from there; with "
            "--restart another one starts anew; without either, remove it",
            "down：权重含 NaN 或无穷大（第 0 至 127 行中有 1 个）：请使用未损坏的检查点。已完成的层（1 个）保留在 "
            "o.quantization：问题解决后，再次执行同一命令即可继续；加 --restart 则重新开始；两者都不需要时请删除它",
        ),
        ("an unknown error: the model changed", "an unknown error: the model changed"),  # not half of it
    ],
)
def test_messages_within_messages(english: str, chinese: str) -> None:
    assert CHINESE.gettext(english) == chinese
