"""Whether a space at the beginning of an answer is part of its text."""

from warpbus.engine.sampling_params import SamplingParams
from warpbus.models.tokenizers import StreamDecoder, Tokenizer


def keeps_first_space(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> bool:
    """Whether the answer to a prompt may begin with a space.

    SentencePiece tokenizers put a space before each text. It is not part of an answer that is a text of its own: one to
    a conversation, or behind a special token. An answer that follows a grammar, or goes on with the prompt's text, has
    all its spaces.
    """
    continues = params.continues_text and bool(prompt) and bool(tokenizer.token_bytes(prompt[-1]))
    return continues or params.grammar is not None


def answer_decoder(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> StreamDecoder:
    """For the text of the answer to a prompt."""
    return StreamDecoder(tokenizer, keep_first_space=keeps_first_space(tokenizer, prompt, params))
