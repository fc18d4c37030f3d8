"""Findings: what a CUDA program on the CPU did wrong, in English or Chinese.

The program writes a finding as a line of JSON, its kind and the fields of that kind: see `on_cpu/threads.h`,
`on_cpu/checks.h` and `exercise_files/exercise.cu`.
"""

import os
from typing import Any, TypeAlias

from warpbus.cuda.finding_words import WORDS

_FIRST_PAGE = 4096  # bytes at address 0 that are never allocated: elements of an array at a null pointer are there

Finding: TypeAlias = dict[str, Any]
"""`kind`, and the fields of that kind: places such as `block` are [x, y, z], `line` is a line of the source."""

LANGUAGES = ("en", "zh")


def language_of_locale() -> str:
    """The language of messages: "zh" under a Chinese locale, else "en"; `WARPBUS_LANG` comes before the locale."""
    for name in ("WARPBUS_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(name)
        if value:
            return "zh" if value.startswith("zh") else "en"
    return "en"


_OF_A_BLOCK = (
    "barrier",
    "divergent",
    "warp",
    "warpgroup",
    "mbarrier_stuck",
    "mbarrier_surplus",
    "named_stuck",
    "cluster_stuck",
    "in_flight",
)


def _word(name: str, language: str) -> str:
    return WORDS[name][LANGUAGES.index(language)]


def _place(at: list[int]) -> str:
    return f"({', '.join(map(str, at))})"


def explain(finding: Finding, language: str = "en") -> str:
    """A mistake in one sentence.

    Args:
        finding: of any kind but "traffic" and "timing".
        language: of `LANGUAGES`.
    """
    fields = {key: _place(value) if isinstance(value, list) else value for key, value in finding.items()}
    fields |= {f"{key}_number": finding[key] for key in ("line", "its_line") if key in finding}
    for key in ("line", "its_line"):
        fields[key] = _word("line", language).format(line=finding[key]) if finding.get(key) else ""
    if "array" in finding and isinstance(finding.get("index"), list):
        fields["index"] = "][".join(map(str, finding["index"]))
    for key, verb in (("writes", "verb"), ("its_writes", "its_verb")):
        fields[verb] = _word({1: "writes", 0: "reads", None: "accesses"}[finding.get(key)], language)
    if "memory" in finding:
        fields["memory"] = _word(finding["memory"], language)
    if "thread" in finding:
        fields["at"] = _word("at", language).format(**fields)
    kind = _kind(finding)
    if kind in ("outside", "padding"):
        count = finding["count"]
        fields |= {"last": count - 1, "elements": f"{_count(count, 'element')} of {_count(finding['element'], 'byte')}"}
        fields["hint"] = _word("one_past" if finding["index"] == count else "far", language).format(**fields)
    if kind in _OF_A_BLOCK:
        fields["block"] = _word("block", language).format(**fields)
    if kind == "barrier":
        fields["threads"] = f"{_count(finding['count'], 'thread')} wait{'s' if finding['count'] == 1 else ''}"
    if kind == "warp":
        fields["mask"] = f"0x{finding['mask']:08x}"
    if "problem" in finding:
        fields["problem"] = _word(finding["problem"], language).format(**fields)
    if "its_what" in finding and kind in ("not_waited", "still_read"):
        fields["its_what"] = _word(finding["its_what"], language)
        fields["its_wait"] = _word("wait_" + finding["its_what"], language)
    if kind == "mbarrier_surplus":
        fields["bytes"] = -finding["bytes"]
    if kind in ("spin", "spin_launch", "proxy_fence"):
        fields["what"] = _word(finding["what"], language) if finding["what"] in WORDS else finding["what"]
    if kind in ("warp", "warpgroup"):
        fields["state"] = _word(finding["state"], language).format(**fields)
    if kind == "race":
        fields["no_barrier"] = _word("no_syncwarp" if finding["same_warp"] else "no_syncthreads", language)
        one_line = finding["memory"] == "device" and finding.get("line") == finding.get("its_line")
        fields["remedy"] = _word("one_line" if one_line else "two_lines", language)
    if kind == "rejected":
        fields["hint"] = _word(finding["hint"], language) if "hint" in finding else ""
        if finding["said"].endswith("?"):
            fields["hint"] = fields["hint"][1:]  # the question mark ends the sentence
    return _word(kind, language).format(**fields)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind(finding: Finding) -> str:
    """The kind, by its fields where one kind has two sentences."""
    kind: str = finding["kind"]
    if kind in ("outside", "padding") and finding["index"] < 0:
        return "before" if kind == "outside" else "padding_before"
    if kind == "race" and not finding["same_block"]:
        return "race_blocks"
    if kind == "wild" and (finding["address"] == "(nil)" or int(finding["address"], 16) < _FIRST_PAGE):
        kind = "null"
    if kind in ("wild", "null", "endless", "freed", "division", "ptx") and "thread" not in finding:
        return f"{kind}_host"
    if kind == "mbarrier_stuck" and finding["bytes"] < 0:
        return "mbarrier_surplus"
    if kind == "status" and finding["status"] == "invalid configuration argument":
        return "configuration"
    return "missing" if kind == "wrong" and finding["unwritten"] else kind
