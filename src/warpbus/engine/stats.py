"""Counters and gauges of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of an engine.

    Attributes:
        running, waiting: sequences.
        steps: launched steps.
        preemptions: how often a sequence was preempted.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        host_hits: those of the found tokens whose blocks were in main memory.
        host_bytes: bytes of the blocks that are kept in main memory.
        host_stored_bytes, host_loaded_bytes: bytes of blocks that were copied to main memory, and back.
        disk_hits: those whose blocks were on the disk.
        disk_bytes: bytes of the blocks that are kept on the disk.
        disk_stored_bytes, disk_loaded_bytes: bytes of blocks that were written to the disk, and read.
        blocks, blocks_used, blocks_idle: blocks of the cache, those of P-Tuning prefixes excluded: the most there can
            be, those used by sequences, and those kept in the prefix cache only.
        cache_bytes: committed memory of the cache.
        drafted, accepted: draft tokens of speculation, and how many of them were accepted.
        experts_exchanged: experts that were brought to the GPU in place of others.
        expert_choices, host_expert_choices: how often tokens chose an expert in layers with offloaded ones, and one in
            the memory of the host; counted every 128 steps.
        planning: seconds of the host for scheduling steps.
        launching: seconds of the host for preparing and launching steps; on the CPU, for computing them.
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
    drafted: int = 0
    accepted: int = 0
    host_hits: int = 0
    host_bytes: int = 0
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    disk_hits: int = 0
    disk_bytes: int = 0
    disk_stored_bytes: int = 0
    disk_loaded_bytes: int = 0
    experts_exchanged: int = 0
    expert_choices: int = 0
    host_expert_choices: int = 0
    planning: float = 0.0
    launching: float = 0.0

    @property
    def acceptance(self) -> float:
        """The share of the draft tokens that were accepted, from 0 to 1; 0 before the first draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def host_expert_share(self) -> float:
        """The share of the chosen experts that lay in the memory of the host, from 0 to 1; 0 before the first count."""
        return self.host_expert_choices / self.expert_choices if self.expert_choices else 0.0
