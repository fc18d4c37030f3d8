"""ChatGLM-6B (v1) and THUDM's quantized files against a reference of loops (chatglm_reference.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chatglm_reference import chatglm2_logits, chatglm_logits, dequantized
from quantized_files import CHATGLM, CHATGLM6B, all_tensors, same, write_files, write_quantized, write_thudm
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_layer, load_model, read_config, tensor_map
from warpbus.models.convert import convert
from warpbus.models.layers import CausalAttention, QuantizedLinear, coordinates, prompt_lengths
from warpbus.models.row_order import in_decoder_order, in_file_order
from warpbus.models.saving import named_tensors

SOP = 90
CONFIG: dict[str, Any] = {
    "model_type": "chatglm",
    "num_layers": 3,
    "vocab_size": 97,
    "hidden_size": 256,
    "inner_hidden_size": 160,
    "num_attention_heads": 2,
    "layernorm_epsilon": 1e-5,
    "max_sequence_length": 128,
    "position_encoding_2d": True,
    "bos_token_id": SOP,
    "eos_token_id": 91,
}
PROMPTS, ANSWERS = (2, 9, 5), (7, 1, 4)


def chatglm_tensors(config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random ChatGLM-6B by the names of its files; norms and biases are far from 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    hidden, ffn = config["hidden_size"], config["inner_hidden_size"]

    def drawn(*shape: int, by: float = 0.5) -> Tensor:
        return (torch.randn(shape, generator=generator) * by).to(dtype)

    linears = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (ffn, hidden),
        "mlp.dense_4h_to_h": (hidden, ffn),
    }
    tensors = {"transformer.word_embeddings.weight": drawn(config["vocab_size"], hidden)}
    norms = ["transformer.final_layernorm"]
    for layer in range(config["num_layers"]):
        at = f"transformer.layers.{layer}."
        norms += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
        for name, (rows, columns) in linears.items():
            tensors[f"{at}{name}.weight"] = drawn(rows, columns, by=2 * columns**-0.5)
            tensors[f"{at}{name}.bias"] = drawn(rows)
        tensors[f"{at}attention.rotary_emb.inv_freq"] = torch.ones(32).half()
    for name in norms:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + drawn(hidden, by=0.3), drawn(hidden, by=0.3)
    tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    return tensors


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("models") / "chatglm", CONFIG, chatglm_tensors())


def load(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


def sequences(vocabulary: int = CONFIG["vocab_size"], sop: int = SOP) -> list[list[int]]:
    """Prompts of different lengths, <sop>, and answers, one of which has another <sop>."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = torch.randint(0, min(sop, vocabulary), (prompt + answer,), generator=generator).tolist()
        found.append([*ids[:prompt], sop, *ids[prompt:]])
    found[0][-2] = sop
    return found


def padded(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return [chatglm_logits(CONFIG, chatglm_tensors(), tokens) for tokens in sequences()]


class GrowingCache:
    """All keys and values, joined; a prompt comes in one piece."""

    def __init__(self, prompts_bt: Tensor) -> None:
        self.prompts_bt = prompts_bt
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        k, v = k_bthd, v_bthd
        if layer in self.kept:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        reach = torch.maximum(positions_bt, self.prompts_bt - 1)
        mask = (torch.arange(k.shape[1]) <= reach[..., None])[:, None]
        heads = (x.transpose(1, 2) for x in (q_bthd, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


@torch.no_grad()
def test_logits_of_prompts_of_different_lengths(directory: Path, expected: list[Tensor]) -> None:
    model, rows = load(directory), sequences()
    together = model(padded(rows))
    for row, tokens, reference in zip(together, rows, expected, strict=True):
        assert reference.std() > 0.1, "logits that hardly differ would hide mistakes"
        assert distance(row[: len(tokens)], reference) < 1e-5
        assert distance(model(torch.tensor([tokens]))[0], reference) < 1e-5


@torch.no_grad()
def test_token_by_token_after_the_prompt(directory: Path, expected: list[Tensor]) -> None:
    model = load(directory)
    for row, reference in zip(sequences(), expected, strict=True):
        tokens = torch.tensor([row])
        positions = torch.arange(len(row))[None]
        prompts = torch.tensor([[row.index(SOP)]])
        cache = GrowingCache(prompts)
        first = row.index(SOP) + 1
        pieces = [slice(0, first), *(slice(at, at + 1) for at in range(first, len(row)))]
        found = [model(tokens[:, piece], positions[:, piece], cache, prompts) for piece in pieces]
        assert distance(torch.cat(found, dim=1)[0], reference) < 1e-5


@torch.no_grad()
def test_packed_documents(directory: Path, expected: list[Tensor]) -> None:
    model, rows = load(directory), sequences()
    numbers = torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    found = model(torch.tensor([[token for row in rows for token in row]]), positions, CausalAttention(numbers))
    for part, reference in zip(found[0].split(list(map(len, rows))), expected, strict=True):
        assert distance(part, reference) < 1e-5


@torch.no_grad()
def test_the_prompt_sees_itself_in_both_directions_and_nothing_after_it(directory: Path) -> None:
    model = load(directory)
    row = sequences()[1]
    tokens = torch.tensor([row] * 3)
    tokens[1, 4] += 1  # of the prompt
    tokens[2, -1] += 1  # of the answer
    same_rows, in_prompt, in_answer = model.hidden(tokens)
    assert not torch.isclose(same_rows[:4], in_prompt[:4], atol=1e-3).all(-1).any()
    assert torch.allclose(same_rows[:-1], in_answer[:-1], atol=1e-4)


def test_coordinates_and_prompts_by_hand() -> None:
    tokens = torch.tensor([[7, 8, 1, 9, 1, 9], [1, 7, 7, 7, 7, 7], [7, 7, 7, 7, 7, 7]])
    prompts = prompt_lengths(tokens, 1)
    assert prompts.tolist() == [[2] * 6, [0] * 6, [0] * 6]
    first, second = coordinates(torch.arange(6).expand_as(tokens), prompts)
    assert first.tolist() == [[0, 1, 1, 1, 1, 1], [0] * 6, [0] * 6]
    assert second.tolist() == [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [3, 3, 4, 4, 4, 4], [0, 1, 1, 1, 0, 0]])
    assert prompt_lengths(tokens, 1, documents).tolist() == [[2, 2, 2, 1, 1, 1], [0] * 6, [0] * 6]


def test_what_is_saved_is_what_was_read(directory: Path) -> None:
    saved = dict(named_tensors(load(directory), torch.float32))
    tensors = {name: tensor for name, tensor in chatglm_tensors().items() if "inv_freq" not in name}
    del tensors["lm_head.weight"]  # it is the embedding
    assert same(saved, tensors)


def test_rows_of_heads_by_hand() -> None:
    config = read_config_of(CHATGLM6B | {"hidden_size": 16, "num_attention_heads": 2})
    file = torch.arange(48)  # head 0: queries 0 to 7, keys 8 to 15, values 16 to 23; head 1: from 24 on
    ours = in_decoder_order(config, "attention.qkv.bias", file)
    assert ours.view(6, 8)[:, 0].tolist() == [0, 24, 8, 32, 16, 40]
    assert torch.equal(in_file_order(config, "layers.0.attention.qkv.bias", ours), file)
    assert torch.equal(in_decoder_order(config, "attention.o.bias", file), file)
    later = read_config_of(CHATGLM)
    assert torch.equal(in_decoder_order(later, "attention.qkv.bias", file), file)


def read_config_of(values: dict[str, Any]) -> Any:
    class Headers:
        """What of a checkpoint `read_config` looks at."""

        directory = Path("model")
        config = values

        def load_json(self, name: str) -> None:
            return None

    found: Any = read_config(Headers())  # type: ignore[arg-type]
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", "w4a16-g32"),
        ("compressed-tensors", "w8a16-asym"),
        ("gptq", "w3a16-g32"),
        ("awq", "w4a16-g32-asym"),
    ],
)
def test_quantized_formats(tmp_path: Path, form: str, scheme: str) -> None:
    quantized, plain = write_quantized(tmp_path / "quantized", CHATGLM6B, form, scheme)
    model = load(quantized)
    for name in (matrix.name for matrix in model.config.layers[0].matrices):
        assert isinstance(model.layers[1].get_submodule(name), QuantizedLinear)
    for tokens in sequences(40, 40):
        assert distance(model(torch.tensor([tokens]))[0], chatglm_logits(CHATGLM6B, plain, tokens)) < 1e-5


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_rows_of_eight_bits_move_too(tmp_path: Path, scheme: str) -> None:
    quantized, plain = write_quantized(tmp_path / "quantized", CHATGLM6B, "compressed-tensors", scheme)
    name = "transformer.layers.1.attention.query_key_value.weight"
    layer = load(quantized).layers[1].attention.qkv
    assert isinstance(layer, QuantizedLinear)
    config = read_config(Checkpoint(quantized))
    weight, file = layer.weight, plain[name]
    assert torch.equal(weight.dequantize(torch.float32), in_decoder_order(config, "attention.qkv.weight", file))
    assert torch.equal(in_file_order(config, "attention.qkv.weight", weight).dequantize(torch.float32), file)


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_thudm_of_the_first_chatglm(tmp_path: Path, bits: int) -> None:
    quantized, _ = write_thudm(tmp_path / "quantized", bits, CHATGLM6B)
    model, plain = load(quantized), dequantized(load_file(quantized / "model.safetensors"), bits)
    assert isinstance(model.layers[0].mlp.down, QuantizedLinear)
    for tokens in sequences(40, 40):
        assert distance(model(torch.tensor([tokens]))[0], chatglm_logits(CHATGLM6B, plain, tokens)) < 1e-5
    layer = load_layer(Checkpoint(quantized), model.config, 1, device="cpu", dtype=torch.float32)
    assert torch.equal(layer.attention.qkv.weight.codes(), model.layers[1].attention.qkv.weight.codes())


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_thudm_of_chatglm2(tmp_path: Path, bits: int) -> None:
    quantized, _ = write_thudm(tmp_path / "quantized", bits)
    model, plain = load(quantized), dequantized(load_file(quantized / "model.safetensors"), bits)
    for tokens in sequences(40, 40):
        assert distance(model(torch.tensor([tokens]))[0], chatglm2_logits(CHATGLM, plain, tokens)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 41])
def test_chatglm2_32k_divides_positions(tmp_path: Path, start: int) -> None:
    values = CHATGLM | {"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k", "kv_channels": 128}
    quantized, plain = write_quantized(tmp_path / "model", values, "compressed-tensors", "w8a16")
    model = load(quantized)
    tokens = sequences(40, 40)[1]
    positions = start + torch.arange(len(tokens))[None]
    found = model(torch.tensor([tokens]), positions)[0]
    assert distance(found, chatglm2_logits(values, plain, tokens, start)) < 1e-5
    assert distance(found, chatglm2_logits(values | {"rope_ratio": 1}, plain, tokens, start)) > 1e-3


@torch.no_grad()
def test_conversion_keeps_the_files_rows(tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path / "quantized", CHATGLM6B, "compressed-tensors", "w4a16-g32")
    convert(quantized, tmp_path / "plain", to="float16")
    written = all_tensors(tmp_path / "plain")
    assert all(torch.equal(written[name].float(), plain[name].half().float()) for name in plain)
    tokens = padded(sequences(40, 40))
    assert distance(load(tmp_path / "plain")(tokens), load(quantized)(tokens).double()) < 1e-2
    with pytest.raises(UsageError, match=r"--pad-ffn 192: the MLP of .* has biases"):
        convert(quantized, tmp_path / "wide", to="gptq", pad_ffn=192)


def test_a_prefix_is_an_adapter(tmp_path: Path) -> None:
    tensors = chatglm_tensors()
    name = "transformer.prefix_encoder.embedding.weight"
    values = CONFIG | {"pre_seq_len": 4}
    assert load(write_files(tmp_path / "base", values, tensors)).config.family == "chatglm"
    for kept in (tensors, {}):
        directory = write_files(tmp_path / str(len(kept)), values, {**kept, name: torch.zeros(4, 1536)})
        with pytest.raises(CheckpointError, match=rf"{name}: this is a P-Tuning prefix: pass it as an adapter"):
            load(directory)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    tensors = chatglm_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        load(write_files(tmp_path / "tied", CONFIG, tensors))
    model = load(write_files(tmp_path / "apart", CONFIG | {"tie_word_embeddings": False}, tensors))
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_the_map_names_every_tensor_of_the_file(directory: Path) -> None:
    names = {name for sources in tensor_map(load(directory).config).values() for name in sources}
    in_file = {name for name in chatglm_tensors() if "inv_freq" not in name}
    assert names == in_file - {"lm_head.weight"}
