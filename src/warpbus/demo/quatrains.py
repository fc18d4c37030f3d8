"""Whether a model keeps to the forms of classical verse: the share of quatrains whose verses have the right length."""

from collections.abc import Sequence

from warpbus.demo.poems import is_quatrain
from warpbus.engine import LLM, SamplingParams

QUATRAINS = {"五言绝句": 5, "七言绝句": 7}


def quatrain_share(llm: LLM, titles: Sequence[str], form: str, params: SamplingParams) -> float:
    """The share of titles for which `llm` writes four verses of the form's length.

    Args:
        llm: a model that was trained on poems.
        titles: titles of the poems.
        form: a key of `QUATRAINS`.
        params: how to sample; `max_tokens` should leave room for a poem that is too long.
    """
    prompts = [llm.render([{"role": "user", "content": f"写一首题为《{title}》的{form}。"}]) for title in titles]
    completions = llm.generate(prompts, params)
    return sum(is_quatrain(completion.text, QUATRAINS[form]) for completion in completions) / len(titles)
