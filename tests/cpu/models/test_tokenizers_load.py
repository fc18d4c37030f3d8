"""Which tokenizer a directory gets, its special tokens, and what happens to damaged files."""

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizer_files import TEXT, write_byte_level, write_chatglm, write_glm4, write_llama, write_poet
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers import (
    HuggingFaceTokenizer,
    RankTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
)
from warpbus.models.tokenizers.spm import CHATGLM3_SPECIALS


def test_control_symbols_of_the_model_are_special(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_poet(tmp_path))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.special_ids["[gMASK]"] == 1
    assert tokenizer.special_ids["<|observation|>"] == 7
    assert not tokenizer.drops_first_space


@pytest.mark.parametrize(("version", "last"), [(2, "eop"), (3, "<|observation|>")])
def test_chatglm_specials_follow_the_pieces(tmp_path: Path, version: int, last: str) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=version))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).get_piece_size()
    assert tokenizer.special_ids["[MASK]"] == pieces
    assert tokenizer.special_ids["sop"] == pieces + 3
    assert tokenizer.special_ids[last] == tokenizer.vocab_size - 1
    assert ("<|user|>" in tokenizer.special_ids) == (version == 3)
    assert tokenizer.drops_first_space


def _chatglm(directory: Path, **changes: object) -> Path:
    write_chatglm(directory, version=2)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("changes", "is_third"),
    [
        ({"eos_token_id": [2, 64795, 64797]}, True),
        ({"_name_or_path": "THUDM/chatglm3-6b"}, True),
        ({"auto_map": {"AutoConfig": "THUDM/chatglm3-6b-32k--configuration_chatglm.ChatGLMConfig"}}, True),
        ({"seq_length": 8192}, True),
        ({"_name_or_path": "THUDM/chatglm2-6b", "seq_length": 32768}, False),
    ],
)
def test_chatglm3_is_reported_by_its_configuration(tmp_path: Path, changes: dict[str, object], is_third: bool) -> None:
    assert ("<|user|>" in load_tokenizer(_chatglm(tmp_path, **changes)).special_ids) == is_third


@pytest.mark.parametrize("is_third", [True, False])
def test_published_source_beside_the_model_outweighs_its_name(tmp_path: Path, is_third: bool) -> None:
    _chatglm(tmp_path, seq_length=8192)
    roles = '"<|user|>", "<|observation|>"' if is_third else ""
    (tmp_path / "tokenization_chatglm.py").write_text(f'raise SystemExit  # special_tokens = ["sop", {roles}]')
    assert ("<|user|>" in load_tokenizer(tmp_path).special_ids) == is_third


def test_real_chatglm3_ids_follow_from_its_number_of_pieces() -> None:
    ids = {text: 64789 + i for i, text in enumerate(CHATGLM3_SPECIALS)}
    assert ids["[gMASK]"] == 64790
    assert ids["sop"] == 64792
    assert [ids[f"<|{role}|>"] for role in ("system", "user", "assistant", "observation")] == [
        64794,
        64795,
        64796,
        64797,
    ]


def test_ranks_are_reported_from_sentencepiece_and_bring_glm4_specials(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    assert isinstance(tokenizer, RankTokenizer)
    assert tokenizer.special_ids["<|endoftext|>"] == 151329
    assert tokenizer.special_ids["[gMASK]"] == 151331
    assert tokenizer.special_ids["<sop>"] == 151333
    assert tokenizer.special_ids["<|user|>"] == 151336
    assert tokenizer.special_ids["<|end_of_video|>"] == 151342
    assert tokenizer.vocab_size == 151343
    assert tokenizer.encode("你好") == [260]
    # A line end is cut from the word behind it, a space is not, and digits go by threes.
    assert tokenizer.encode("\n你好") == [10, 260]
    assert tokenizer.encode("1234") == [49, 50, 51, 52]


def test_ranks_take_special_tokens_from_the_tokenizer_config(tmp_path: Path) -> None:
    write_glm4(tmp_path)
    listed = {"300": {"content": "<|user|>", "special": True}, "301": {"content": "plain", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert load_tokenizer(tmp_path).special_ids == {"<|user|>": 300}
    listed = {"65": {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match="id 65 is given twice"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "listed", [[1], {"x": {"content": "a", "special": True}}, {"3": "a"}, {"3": {"special": True}}]
)
def test_malformed_list_of_special_tokens(tmp_path: Path, listed: object) -> None:
    write_glm4(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder: expected ids"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_comes_before_tokenizer_model(tmp_path: Path) -> None:
    write_poet(tmp_path)
    assert isinstance(load_tokenizer(write_byte_level(tmp_path)), HuggingFaceTokenizer)


def test_tokenizer_json_decodes_as_its_own_library_does(tmp_path: Path) -> None:
    for write in (write_byte_level, write_llama):
        tokenizer = load_tokenizer(write(tmp_path))
        library = Library.from_file(str(tmp_path / "tokenizer.json"))
        for text in (TEXT, " moon  moo", "moon<think> a\tb", "月月 m"):
            ids = tokenizer.encode(text)
            assert ids == library.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_sentencepiece_decodes_as_its_own_library_does(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=2))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (TEXT, "", " ", "  two  spaces ", "😀\n\n\t", "你好"):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids) == text


def test_special_text_within_the_vocabulary_is_cut(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_level(tmp_path, ignore_merges=True))
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    assert tokenizer.special_ids["<s>"] in library.encode("<s>").ids
    assert tokenizer.special_ids["<s>"] not in tokenizer.encode("<s>")
    assert tokenizer.decode(tokenizer.encode("<s>")) == "<s>"


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b'{"model": ', "damaged"),
        ("tokenizer.json", b"\xff\xfe", "damaged"),
        ("tokenizer.model", b"\n\x05 not a proto", "not a SentencePiece model"),
        ("tokenizer.model", b"AA== 0\nnonsense\n", "line 2 is not"),
        ("tokenizer.model", b"AA== 0\n", "byte 0x01 has no rank"),
        ("tokenizer.model", b"", "byte 0x00 has no rank"),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_sentencepiece_model(tmp_path: Path) -> None:
    path = write_poet(tmp_path) / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a SentencePiece model, or damaged"):
        load_tokenizer(tmp_path)


def test_damaged_configuration_beside_the_tokenizer(tmp_path: Path) -> None:
    write_poet(tmp_path)
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: is not JSON"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_of_other_kinds_is_refused(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"a": 0}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="model type WordLevel is not understood"):
        load_tokenizer(tmp_path)
    library = Library(models.BPE(vocab={"a": 0}, merges=[]))
    library.decoder = decoders.CTC()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"decoder .*CTC.* is not understood"):
        load_tokenizer(tmp_path)
