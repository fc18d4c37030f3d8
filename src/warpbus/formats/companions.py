"""The files of a model directory that are copied when its weights are converted."""

from pathlib import Path

# Tokenizer, templates, code that other programs run, licences. Notes on the unquantized model and
# logs of its training do not.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*LICENSE*",
)


def find_companions(model: Path) -> tuple[Path, ...]:
    """The companions of the weights in a model directory, sorted."""
    return tuple(sorted({file for pattern in _COMPANIONS for file in model.glob(pattern) if file.is_file()}))
