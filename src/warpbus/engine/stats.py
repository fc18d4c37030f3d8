"""What an engine is doing, and has done, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What an engine is doing, and has done.

    Attributes:
        running, waiting: sequences.
        steps: that were launched.
        preemptions: how often a sequence had to give its blocks back.
        prefix_queries, prefix_hits: tokens of prompts looked up in the cache, and found.
        blocks, blocks_used, blocks_idle: of the cache, without those of prefixes: all there can be, used, and kept for
            who may want them.
        cache_bytes: memory that the cache has now.
        drafted, accepted: tokens guessed by speculation, and how many of them were right.
        planning: seconds in which the host has chosen who is in a step.
        launching: seconds in which it has prepared steps and launched them; on the CPU, in which it has computed them.
    """

    running: int
    waiting: int
    steps: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    blocks: int
    blocks_used: int
    blocks_idle: int
    cache_bytes: int
    drafted: int
    accepted: int
    planning: float = 0.0
    launching: float = 0.0
