"""The files of a model directory that are copied when its weights are converted."""

from pathlib import Path

ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""The directory of a model's chat templates besides the default one, each in `NAME.jinja`."""

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
    f"{ADDITIONAL_TEMPLATES}/*.jinja",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*LICENSE*",
)


def find_companions(model: Path) -> dict[str, Path]:
    """The companions of the weights in a model directory, by their path in it, sorted."""
    found = sorted({file for pattern in _COMPANIONS for file in model.glob(pattern) if file.is_file()})
    return {file.relative_to(model).as_posix(): file for file in found}
