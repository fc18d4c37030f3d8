"""Hugging Face's `tokenizer.json`, read by the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers.base import Tokenizer, check_text

_SPACE = "\u2581"


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. Its added tokens marked `special` are the special tokens, and those of `added`.

    Understood are the two ways in which such a file spells bytes: every byte as a printable character (`ByteLevel`:
    GLM-4, Qwen, Llama 3), and U+2581 for a space with `<0x..>` for bytes outside the vocabulary (Llama 2).

    Args:
        path: of the file.
        added: tokens to be added; those that the file has among its added ones are left as they are there. One that
            is in the vocabulary keeps its id, others get the ids behind the last one.

    Raises CheckpointError if the file is missing, damaged, or spells bytes in another way.
    """

    own_spaces: frozenset[int] = frozenset()

    def __init__(self, path: Path, *, added: Sequence[AddedToken] = ()) -> None:
        try:
            source = path.read_text(encoding="utf-8")
            description: dict[str, Any] = json.loads(source)
            self._library = Library.from_str(source)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); restore the file from the model's source"
            ) from None
        # The library raises plain Exception for a file that it does not understand.
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{path}: not a tokenizer.json, or damaged ({reason}); restore the file from the model's source"
            ) from None
        # Metaspace with the scheme "first" puts a space before the beginning of a prompt, not behind special tokens.
        later = _without_first_space(description)
        self._later = self._library if later is None else Library.from_str(json.dumps(later))
        known = description.get("added_tokens") or []
        texts = {"", *(str(token["content"]) for token in known)}
        missing = [token for token in added if token.content not in texts]
        for library in (self._library, self._later):
            library.add_tokens(missing)
            library.no_truncation()
            library.no_padding()
            # "<|user|>" typed by a user is then text like any other.
            library.encode_special_tokens = True
        self.prompt_prefix, self.text_suffix = _around_texts(path, description.get("post_processor"))
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        special = {str(token["content"]): int(token["id"]) for token in known if token.get("special")}
        special |= {token.content: vocabulary[token.content] for token in missing if token.special}
        self.special_ids: dict[str, int] = special
        strips = {str(token["content"]): (token.get("lstrip") is True, token.get("rstrip") is True) for token in known}
        strips |= {token.content: (token.lstrip, token.rstrip) for token in missing}
        self.strips = {text: sides for text, sides in strips.items() if text in special and any(sides)}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        model = description.get("model") or {}
        if model.get("type") != "BPE":
            raise CheckpointError(
                f"{path}: model type {model.get('type')} is not understood: expected BPE; use a checkpoint with such a "
                "tokenizer"
            )
        unknown = model.get("unk_token")
        forbidden = {text: i for text, i in self.special_ids.items() if text != unknown}
        self._forbidden = frozenset(forbidden.values())
        # Wherever one of these texts begins, also within another one.
        self._openings = re.compile("(?=" + ("|".join(map(re.escape, filter(None, forbidden))) or "(?!)") + ")")
        steps = _decoder_steps(description.get("decoder"))
        kinds = {step.get("type") for step in steps}
        if "ByteLevel" in kinds:
            spell = _from_byte_level
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            spell = _from_pieces
        else:
            raise CheckpointError(
                f"{path}: decoder {sorted(map(str, kinds))} is not understood: expected ByteLevel, or ByteFallback or "
                "Metaspace with U+2581 for a space; use a checkpoint with such a tokenizer"
            )
        self.drops_first_space = any(
            step.get("type") == "Strip" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        literal = {int(token["id"]) for token in known}
        literal |= {vocabulary[token.content] for token in missing}
        hidden = set(self.special_ids.values())
        self._bytes = {
            index: text.encode() if index in literal else spell(text)
            for text, index in vocabulary.items()
            if index not in hidden
        }

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._encoded(text, self._library)

    def encode_after_special(self, text: str) -> list[int]:
        """See `Tokenizer.encode_after_special`."""
        return self._encoded(text, self._later)

    def _encoded(self, text: str, library: Library) -> list[int]:
        check_text(text)
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        if self._forbidden.isdisjoint(ids):
            return ids
        # The vocabulary proper holds the special's text too, and the file says to look there before merging. A piece
        # that holds none of these texts whole cannot become one; what is left is a normalizer that makes one out of
        # other characters, and that is no text to keep.
        cuts = [0, *(match.start() + 1 for match in self._openings.finditer(text)), len(text)]
        pieces = (
            (self._later if a else library).encode(text[a:b], add_special_tokens=False).ids for a, b in pairwise(cuts)
        )
        return [i for piece in pieces for i in piece if i not in self._forbidden]

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._bytes.get(token, b"")


def _around_texts(path: Path, post_processor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor puts before a text, and those that it puts behind it.

    They are read from the file, because the library panics over a template whose tokens are not defined.
    """
    steps = post_processor.get("processors", [post_processor]) if isinstance(post_processor, dict) else []
    before: list[int] = []
    after: list[int] = []
    try:
        for step in steps:
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                before, after = [int(step["cls"][1]), *before], [*after, int(step["sep"][1])]
            elif step["type"] == "TemplateProcessing":
                names = [part.get("SpecialToken", {}).get("id") for part in step["single"]]  # None: the text
                ids = [[] if name is None else step["special_tokens"][name]["ids"] for name in names]
                middle = names.index(None)
                before = [*chain.from_iterable(ids[:middle]), *before]
                after = [*after, *chain.from_iterable(ids[middle:])]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: post_processor: expected a template with the text and defined special tokens; restore the file "
            "from the model's source"
        ) from None
    return tuple(before), tuple(after)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders") or [])
    return [decoder]


def _without_first_space(description: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer with no space before a text; None if it does not distinguish the beginning of a prompt."""
    outer = description.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers") or [outer]
    if not any(step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps):
        return None
    changed = [step | {"prepend_scheme": "never"} if step.get("type") == "Metaspace" else step for step in steps]
    inner = outer | {"pretokenizers": changed} if "pretokenizers" in outer else changed[0]
    return description | {"pre_tokenizer": inner}


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte (Radford et al. 2019, GPT-2).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def _from_pieces(text: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
    if byte:
        return bytes([int(byte[1], 16)])
    return text.replace(_SPACE, " ").encode()
