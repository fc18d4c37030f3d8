"""Tiny tokenizer files of every kind, trained or written on the spot: stand-ins for those of the real models."""

import base64
import io
import json
import struct
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


def write_chatglm(directory: Path, *, version: int) -> Path:
    """SentencePiece BPE with bytes and a space put before every text, as ChatGLM2 and ChatGLM3 have."""
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
    config = {"model_type": "chatglm", "eos_token_id": 2}
    tokenizer_config: dict[str, object] = {"tokenizer_class": "ChatGLMTokenizer"}
    if version == 3:
        tokenizer_config["added_tokens_decoder"] = {"64795": {"content": "<|user|>", "special": True}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


CHATGLM6B_SPECIALS = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>")


def write_chatglm6b(directory: Path, *, early: bool) -> Path:
    """ChatGLM-6B's `ice_text.model`.

    The early revision has no special tokens, tabs, runs of spaces or bytes in its file, and 50 tokens of images.
    """
    blanks = [f"<|blank_{length}|>" for length in range(2, 81)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.replace("\n", "。"), "你好，你好"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=110 if early else 460,
        user_defined_symbols=["<n>"] if early else ["<n>", "<|tab|>", *blanks],
        control_symbols=["<pad>"] if early else ["<pad>", *CHATGLM6B_SPECIALS],
        byte_fallback=not early,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (directory / "ice_text.model").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    begin = 50 + pieces.get_piece_size() + 4 if early else pieces.piece_to_id("<sop>")
    config = {"model_type": "chatglm", "position_encoding_2d": True, "vocab_size": 600}
    config |= {"bos_token_id": begin, "eos_token_id": begin + 1}
    (directory / "config.json").write_text(json.dumps(config))
    named = {"tokenizer_class": "ChatGLMTokenizer", "bos_token": "<sop>", "eos_token": "<eop>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named if early else {**named, "num_image_tokens": 0}))
    return directory


def write_full_chatglm6b(directory: Path, *, early: bool) -> Path:
    """A vocabulary with the real one's numbers: 130000 pieces of text, of which 你好 is 74874, and what is behind them.

    Written as the protocol buffer that SentencePiece reads: field 1 of the model is a piece, field 2 the trainer's
    settings (35 of them is byte_fallback), field 3 the normalizer's (4 is remove_extra_whitespaces).
    """

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def piece(text: str, kind: int, score: float = 0.0) -> bytes:
        return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))

    names = ["<unk>", "<s>", "</s>", "<pad>", "<n>", "\u2581"]
    pieces = [piece(text, kind) for text, kind in zip(names, (2, 3, 3, 3, 4, 1), strict=True)]
    fill = [f"filler {i}" for i in range(6, 130000)]
    fill[74874 - 6] = "你好"
    pieces += [piece(text, 1, -10.0) for text in fill]
    if not early:
        specials = (*CHATGLM6B_SPECIALS, "<ENC>", "<dBLOCK>")
        pieces += [piece(text, 3) for text in specials]
        pieces += [piece(text, 4) for text in ("<|tab|>", *(f"<|blank_{i}|>" for i in range(2, 81)))]
        pieces += [piece(f"<0x{byte:02X}>", 6) for byte in range(256)]
    settings = field(2, b"" if early else b"\x98\x02\x01") + field(3, b"\x20\x00")
    (directory / "ice_text.model").write_bytes(b"".join(pieces) + settings)
    end, size = (150005, 150528) if early else (130005, 130528)
    config = {"model_type": "chatglm", "bos_token_id": end - 1, "eos_token_id": end, "vocab_size": size}
    (directory / "config.json").write_text(json.dumps(config))
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


def write_byte_level(directory: Path, *, ignore_merges: bool = False) -> Path:
    """A byte-level tokenizer.json as GLM-4, Qwen and Llama 3 have; `ignore_merges` puts `<s>` into the vocabulary."""
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
    library.add_tokens([AddedToken("<think>", special=False)])
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
