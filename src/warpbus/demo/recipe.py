"""How the data of `glm-poet` is made from poems: vocabulary, configuration, conversations.

    python -m warpbus.demo.recipe --train poems-train.jsonl.xz --valid poems-valid.jsonl.xz --output poet-data

Each poem becomes `--renderings` conversations: write it for its title, continue it, give the verse that follows.
`--model poet-moe` writes the configuration of a mixture of experts for the same vocabulary and conversations.
"""

import argparse
import json
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from warpbus.demo.poems import Poem, read_poem
from warpbus.errors import DataError, UsageError, WarpbusError
from warpbus.models.tokenizers.training import train_sentencepiece

SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{%- for message in messages -%}"
    "<|{{ message['role'] }}|>{{ '\\n' }}{{ message['content'] }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{{ '\\n' }}{%- endif -%}"
)

_MOE: dict[str, object] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 0,
}

ENGLISH_FORMS = {
    "五言绝句": "five-character quatrain",
    "七言绝句": "seven-character quatrain",
    "五言律诗": "five-character regulated verse",
    "七言律诗": "seven-character regulated verse",
}

Conversation = list[dict[str, str]]


def compose(poem: Poem, rng: random.Random) -> Conversation:
    """Write a poem for a title, or without one; in a form, in the manner of a dynasty or an author."""
    form = poem.form if poem.form and rng.random() < 0.65 else None
    if poem.form in ENGLISH_FORMS and rng.random() < 0.06:
        asked = f"Write a {ENGLISH_FORMS[poem.form]} titled 《{poem.title}》."
        return _turn(asked, poem.text)
    kind = form or "诗"
    manner = ""
    draw = rng.random()
    if draw < 0.2:
        manner = rng.choice((f"仿{poem.author}，", f"以{poem.author}的风格，", f"学{poem.author}，"))
    elif draw < 0.35:
        manner = rng.choice((f"仿{poem.dynasty}人，", f"以{poem.dynasty}诗的风格，"))
    elif draw < 0.45:
        manner = f"以{poem.dynasty}代{poem.author}的风格，"
    if rng.random() < 0.1:
        return _turn(f"{manner}写一首{kind}。", poem.text)
    asked = rng.choice(
        (
            f"写一首题为《{poem.title}》的{kind}。",
            f"写一首题为《{poem.title}》的{kind}",
            f"以《{poem.title}》为题，写一首{kind}。",
            f"以《{poem.title}》为题作{kind}一首。",
            f"请写一首{kind}，题目是《{poem.title}》。",
        )
    )
    if not manner and rng.random() < 0.2:
        asked = f"{'请写一首' if rng.random() < 0.5 else ''}《{poem.title}》"
    return _turn(manner + asked, poem.text)


def continue_poem(poem: Poem, rng: random.Random) -> Conversation:
    """Given the first couplets, write the rest."""
    given = rng.randrange(1, len(poem.couplets))
    asked = rng.choice(("续写：", "续写这首诗：", "把这首诗写完：", "Continue this poem: "))
    return _turn(asked + "\n".join(poem.couplets[:given]), "\n".join(poem.couplets[given:]))


def next_verse(poem: Poem, rng: random.Random) -> Conversation:
    """Given a couplet or half of one, give what follows it; sometimes go on through the poem."""
    if rng.random() < 0.5:
        units = list(poem.couplets)
    else:
        units = [half for couplet in poem.couplets for half in _halves(couplet)]
    if len(units) < 2:
        return compose(poem, rng)
    index = rng.randrange(len(units) - 1)
    turns = _turn(ask_next(units[index], rng), units[index + 1])
    while index + 2 < len(units) and rng.random() < 0.3:
        index += 1
        turns += _turn(rng.choice(("再下一句", "下一句呢？", "接着呢？")), units[index + 1])
    return turns


def ask_next(verse: str, rng: random.Random) -> str:
    """A question for the verse that follows `verse`."""
    bare = verse.rstrip("，。？！；：、")
    return rng.choice(
        (
            f"下一句：{verse}",
            f"下一句：{bare}",
            f"“{bare}”的下一句是什么？",
            f"“{verse}”的下一句",
            f"接下一句：{verse}",
            f"What follows “{bare}”?",
        )
    )


def converse(poem: Poem, rng: random.Random, other: Poem) -> Conversation:
    """One conversation about a poem, now and then followed by one about another."""
    draw = rng.random()
    if draw < 0.6 or len(poem.couplets) == 1:
        turns = compose(poem, rng)
    elif draw < 0.8:
        turns = continue_poem(poem, rng)
    else:
        turns = next_verse(poem, rng)
    if len(poem.couplets) <= 6 and len(other.couplets) <= 6 and rng.random() < 0.1:
        turns += compose(other, rng)
    return turns


def read_poems(path: Path) -> Iterator[Poem]:
    """The usable poems of an xz-compressed JSONL file."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                poem = read_poem(json.loads(line))
                if poem is not None:
                    yield poem
    except (OSError, lzma.LZMAError, EOFError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}): expected xz-compressed JSON, one poem a line") from None


def special_id(name: str) -> int:
    """The id of a special token: they follow `<unk>`, which is 0."""
    return SPECIALS.index(name) + 1


_SHAPES: dict[str, dict[str, object]] = {
    "glm-poet": {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    # 29.7 million parameters, 13.1 million of them for each token.
    "poet-moe": {
        **_MOE,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_hidden_layers": 9,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    # Small enough to be trained on a CPU: 0.9 million parameters.
    "poet-moe-small": {
        **_MOE,
        "hidden_size": 64,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}


def config(vocab_size: int, model: str = "glm-poet") -> dict[str, object]:
    """The `config.json` of one of `_SHAPES`."""
    return {
        **_SHAPES[model],
        "vocab_size": vocab_size,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "pad_token_id": special_id("<|endoftext|>"),
        "eos_token_id": [special_id(name) for name in ("<|endoftext|>", "<|user|>", "<|observation|>")],
    }


def _turn(asked: str, answered: str) -> Conversation:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _halves(couplet: str) -> list[str]:
    """`床前明月光，疑是地上霜。` -> the two verses, each with its punctuation."""
    halves: list[str] = [""]
    for character in couplet:
        halves[-1] += character
        if character in "，。？！；：":
            halves.append("")
    return [half for half in halves if half]


def _write_jsonl(path: Path, records: Iterator[object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_model(directory: Path, model: str, poems: list[Poem], vocab_size: int) -> None:
    """The directory that training starts from: vocabulary, templates and configuration, no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    asked = (turn["content"] for poem in poems[::20] for turn in converse(poem, rng, poem))
    texts = (text for source in ((f"{p.title}{p.author}{p.text}" for p in poems), asked) for text in source)
    required = "\n 《》“”，。？！；：、" + "".join(chr(code) for code in range(0x21, 0x7F))
    vocabulary = directory / "tokenizer.model"
    settings = config(
        train_sentencepiece(texts, vocabulary, vocab_size=vocab_size, specials=SPECIALS, required_chars=required), model
    )
    tokenizer = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": settings["max_position_embeddings"],
    }
    generation = {
        "eos_token_id": settings["eos_token_id"],
        "pad_token_id": settings["pad_token_id"],
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
    }
    named = {"config": settings, "tokenizer_config": tokenizer, "generation_config": generation}
    for name, content in named.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")


def _choices(poems: list[Poem], rng: random.Random) -> Iterator[dict[str, object]]:
    """For each poem one question: which couplet follows, among the true one and three of its length elsewhere."""
    by_length: dict[int, list[tuple[int, str]]] = {}
    for number, poem in enumerate(poems):
        for couplet in poem.couplets:
            by_length.setdefault(len(couplet), []).append((number, couplet))
    for number, poem in enumerate(poems):
        if len(poem.couplets) < 2:
            continue
        index = rng.randrange(len(poem.couplets) - 1)
        truth = poem.couplets[index + 1]
        pool = [couplet for owner, couplet in by_length[len(truth)] if owner != number]
        if len(pool) < 3:
            continue
        choices = [truth, *rng.sample(pool, 3)]
        rng.shuffle(choices)
        asked = [{"role": "user", "content": f"下一句：{poem.couplets[index]}"}]
        yield {"messages": asked, "choices": choices, "answer": choices.index(truth)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="poems to train on (jsonl.xz)")
    parser.add_argument("--valid", type=Path, required=True, help="poems held out (jsonl.xz)")
    parser.add_argument("--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--model", choices=_SHAPES, default="glm-poet", help="whose configuration to write")
    parser.add_argument("--renderings", type=int, default=8, help="conversations made of each training poem")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--limit", type=int, help="use this many poems only, to try the recipe")
    options = parser.parse_args()

    if options.output.exists():
        raise UsageError(f"--output {options.output}: exists already: choose another directory or remove it")
    poems = list(read_poems(options.train))[: options.limit]
    held_out = list(read_poems(options.valid))
    _write_model(options.output / "model", options.model, poems, options.vocab_size)

    rng = random.Random(1)
    rendered = (
        {"messages": converse(poem, rng, rng.choice(poems))} for _ in range(options.renderings) for poem in poems
    )
    _write_jsonl(options.output / "train.jsonl", rendered)
    rng = random.Random(2)
    _write_jsonl(
        options.output / "validation.jsonl",
        ({"messages": _turn(f"写一首题为《{poem.title}》的诗。", poem.text)} for poem in held_out),
    )
    _write_jsonl(options.output / "next-verse.jsonl", _choices(held_out, rng))
    calibration = rng.sample(poems, min(1024, len(poems)))
    _write_jsonl(
        options.output / "calibration.jsonl",
        ({"messages": converse(poem, rng, rng.choice(poems))} for poem in calibration),
    )
    print(f"{options.output}: {len(poems):,} poems to train on, {len(held_out):,} held out")


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
