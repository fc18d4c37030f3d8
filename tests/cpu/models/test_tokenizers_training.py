"""The character vocabulary that glm-poet is trained with."""

from pathlib import Path

import pytest

from warpbus.errors import DataError, StorageError, UsageError
from warpbus.models.tokenizers import load_tokenizer
from warpbus.models.tokenizers.training import train_sentencepiece

SPECIALS = ("[gMASK]", "<sop>", "<|user|>")


def test_pieces_are_specials_bytes_required_and_frequent_characters(tmp_path: Path) -> None:
    texts = ["春春春夏夏秋", "春眠\n"] * 3
    size = 1 + len(SPECIALS) + 256 + 5
    made = train_sentencepiece(
        texts, tmp_path / "tokenizer.model", vocab_size=size, specials=SPECIALS, required_chars="\n冬"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert made == tokenizer.vocab_size == size
    assert tokenizer.special_ids == {"[gMASK]": 1, "<sop>": 2, "<|user|>": 3}
    # The space, the two required ones and the two most frequent ones are one token each, the others three bytes.
    assert [len(tokenizer.encode(char)) for char in " \n冬春夏秋眠"] == [1, 1, 1, 1, 1, 3, 3]


@pytest.mark.parametrize(
    "text", ["春\n夏", " a  b ", "\r\n\t\0", "e\u0301 é", "\u3000全角ＡＢＣ①", "😀", "\u2585\ufeff", "<unk>", ""]
)
def test_text_passes_unchanged_and_never_unknown(tmp_path: Path, text: str) -> None:
    train_sentencepiece(
        ["春\n夏 <unk>\u2581\u2585\t\0\r\ud800"],
        tmp_path / "tokenizer.model",
        vocab_size=300,
        specials=SPECIALS,
        required_chars="",
    )
    tokenizer = load_tokenizer(tmp_path)
    assert 0 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_more_characters_than_one_training_sentence_holds(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    made = train_sentencepiece(
        [text], tmp_path / "tokenizer.model", vocab_size=8000, specials=SPECIALS, required_chars=""
    )
    assert made == 1 + 3 + 256 + 1 + 3000
    assert len(load_tokenizer(tmp_path).encode(text)) == 3000


def test_vocabulary_does_not_depend_on_the_order_of_texts(tmp_path: Path) -> None:
    files = []
    for name, texts in (("a", ["春夏", "秋冬", "冬"]), ("b", ["冬", "秋冬", "春夏"])):
        train_sentencepiece(texts, tmp_path / name, vocab_size=263, specials=SPECIALS, required_chars="")
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_no_room_no_text_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with pytest.raises(UsageError, match="vocab_size 261 is too small: 262 pieces are required"):
        train_sentencepiece(["春"], path, vocab_size=261, specials=SPECIALS, required_chars="冬")
    with pytest.raises(DataError, match="empty"):
        train_sentencepiece([], path, vocab_size=300, specials=SPECIALS, required_chars="")
    assert not path.exists()
    with pytest.raises(StorageError, match="cannot be written"):
        train_sentencepiece(["春"], tmp_path / "no" / "t", vocab_size=300, specials=SPECIALS, required_chars="")
