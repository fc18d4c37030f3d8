"""ChatGLM-6B's files of text: small vocabularies of both revisions, and one with the real one's numbers."""

import io
import json
import struct
from pathlib import Path

import sentencepiece

TEXT = "床前明月光，疑是地上霜。举头望明月，低头思故乡。 The moon is bright, and I think of home: 1 2 3!"
CHATGLM6B_SPECIALS = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>")


def write_chatglm6b(directory: Path, *, early: bool) -> Path:
    """ChatGLM-6B's `ice_text.model`.

    The early revision has no special tokens, tabs, runs of spaces or bytes in its file, and 50 tokens of images.
    """
    blanks = [f"<|blank_{length}|>" for length in range(2, 81)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "你好，你好"]),
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
