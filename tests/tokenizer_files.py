"""Tiny tokenizer files of every kind, trained or written on the spot: stand-ins for those of the real models."""

import base64
import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from warpbus.models.tokenizers.training import train_sentencepiece

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
POET_SPECIALS = ("[gMASK]", "<sop>", "<|endoftext|>", *ROLES)
TEXT = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。 The moon is bright, and I think of home: 1 2 3!"


def write_poet(directory: Path) -> Path:
    """SentencePiece with single characters, bytes and control symbols, as glm-poet has."""
    train_sentencepiece(
        [TEXT], directory / "tokenizer.model", vocab_size=600, specials=POET_SPECIALS, required_chars="\n"
    )
    return directory


def train_llama_sentencepiece(directory: Path) -> Path:
    """SentencePiece BPE with bytes and a space put before every text; `<s>` is its token 1."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "[Round 1]\n\n问：你好\n\n答：你好"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        required_chars="\n",
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return directory


def write_chatglm(directory: Path, *, version: int) -> Path:
    """SentencePiece BPE with bytes and a space put before every text, as ChatGLM2 and ChatGLM3 have."""
    train_llama_sentencepiece(directory)
    config = {"model_type": "chatglm", "eos_token_id": 2}
    tokenizer_config: dict[str, object] = {"tokenizer_class": "ChatGLMTokenizer"}
    if version == 3:
        tokenizer_config["added_tokens_decoder"] = {"64795": {"content": "<|user|>", "special": True}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def write_glm4(directory: Path) -> Path:
    """Ranks: the 256 bytes, and merges of a Chinese greeting up to whole characters."""
    tokens = [bytes([i]) for i in range(256)]
    for char in "你好":
        data = char.encode()
        tokens += [data[:2], data]
    tokens.append("你好".encode())
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    return directory


def write_byte_level(directory: Path, *, ignore_merges: bool = False, added: tuple[str, ...] = ("<think>",)) -> Path:
    """A byte-level tokenizer.json as GLM-4, Qwen and Llama 3 have; `ignore_merges` puts `<s>` into the vocabulary.

    Tokens of `added` have text, unlike special ones.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "mo", "moo", "Ġm", *(["<s>"] if ignore_merges else [])]
    library = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("m", "o"), ("mo", "o"), ("Ġ", "m")],
            ignore_merges=ignore_merges,
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not ignore_merges)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", *POET_SPECIALS, "<|im_start|>", "<|im_end|>")]
    )
    library.add_tokens([AddedToken(text, special=False) for text in added])
    library.save(str(directory / "tokenizer.json"))
    return directory


def write_llama(directory: Path) -> Path:
    """A tokenizer.json with U+2581 for spaces and byte pieces, as Llama 2 has."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "m", "o", "n", "▁m", "oo", "月"]
    library = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "m"), ("o", "o")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    library.save(str(directory / "tokenizer.json"))
    return directory
