"""Two adapters for the packaged poet: trained in a minute or two on a CPU, then asked beside the poet itself.

    python examples/poet_adapters.py adapters          # writes adapters/li-bai and adapters/spring
    warpbus serve demo --adapter li-bai=adapters/li-bai --adapter spring=adapters/spring

"li-bai" is a LoRA that was trained on 4-bit weights (QLoRA): whatever form a title suggests, it writes quatrains, as
Li Bai's are that it saw. "spring" is a prefix (P-Tuning v2): asked for any poem, it writes of spring.
"""

import argparse
import sys
from pathlib import Path

import warpbus
from warpbus.demo import data_path, model_path
from warpbus.demo.themes import THEMES, Theme
from warpbus.train import TrainingSettings, train

TITLES = ("登高", "夜泊", "寄友人", "西湖", "雨夜", "古寺", "江行", "秋思", "塞上曲", "听琴", "雪", "病起")
ROWS = {"length": 256, "rows_per_step": 3, "rows_at_once": 3, "warmup": 2}
SETTINGS = {
    "li-bai": TrainingSettings(method="lora", quantize="w4a16-g64", steps=12, learning_rate=2e-3, **ROWS),
    "spring": TrainingSettings(method="ptuning", prefix_tokens=32, steps=16, learning_rate=2e-2, **ROWS),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train two adapters for the packaged poet, and compare.")
    parser.add_argument("output", type=Path, help="a directory for the adapters; those that are in it are used")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    try:
        adapters = make(options.output, options.device)
        llm = warpbus.LLM(model_path(), device=options.device, adapters=adapters)
        for name in (None, *adapters):
            print(f"\n{name or 'the poet itself'}")
            for theme in THEMES.values():
                share, poem = ask(llm, theme, name)
                print(f"{theme.asked.format('…')}  {share:.0%} show {theme.name}, for instance:\n{poem}")
    except warpbus.WarpbusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make(directory: Path, device: str) -> dict[str, Path]:
    """Train what is not in the directory yet; the adapters by their names."""
    for name, settings in SETTINGS.items():
        if not (directory / name).exists():
            data = data_path(f"{name}.jsonl")
            summary = train(model_path(), directory / name, data=data, settings=settings, device=device)
            print(f"{name}: {summary['tokens']:,} tokens in {summary['seconds']:.0f} s, loss {summary['loss']:.2f}")
    return {name: directory / name for name in SETTINGS}


def ask(llm: warpbus.LLM, theme: Theme, adapter: str | None) -> tuple[float, str]:
    """Ask a dozen times: the share of answers that show a theme, and one of them."""
    prompts = [llm.render([{"role": "user", "content": theme.asked.format(title)}]) for title in TITLES]
    params = [
        warpbus.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=80, seed=seed) for seed in range(len(TITLES))
    ]
    texts = [completion.text for completion in llm.generate(prompts, params, adapter=adapter)]
    return sum(theme.shown(text) for text in texts) / len(texts), texts[0]


if __name__ == "__main__":
    sys.exit(main())
