"""Decoders that several threads share as if they were processes, and the shapes of small models to shard."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantized_files import CHATGLM, CHATGLM6B, HF
from torch import Tensor

from warpbus.dist import Group
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 45, (2, 9), generator=torch.Generator().manual_seed(1))
TOKENS[:, 4] = CHATGLM6B["bos_token_id"]
WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "vocab_size": 45}
GLM = HF | WIDE | {"intermediate_size": 256}
GLM4 = GLM | {"model_type": "glm4", "num_key_value_heads": 4}
LLAMA = GLM | {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 8}
QWEN3 = GLM | {"model_type": "qwen3", "intermediate_size": 160}
MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
GLM4_MOE = GLM | MOE | {"model_type": "glm4_moe", "n_routed_experts": 5, "num_key_value_heads": 4}
GLM4_MOE_LITE = GLM4_MOE | {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 16,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
QWEN3_MOE = GLM | MOE | {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2}
CHATGLM1 = CHATGLM6B | {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 45}
CHATGLM2 = CHATGLM | {"hidden_size": 128, "num_attention_heads": 8, "padded_vocab_size": 45}


@dataclass(frozen=True, kw_only=True)
class Threads(Group):
    """The threads of one process as if they were processes."""

    shelf: list[Tensor]
    all_here: threading.Barrier

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.shelf[self.rank] = tensor
        self.all_here.wait()
        gathered = torch.stack(self.shelf)
        self.all_here.wait()
        return gathered

    def smallest(self, value: int) -> int:
        return int(self.all_gather(torch.tensor(value)).min())


def together(world: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns for each process of a group."""
    shelf, all_here = [torch.empty(0)] * world, threading.Barrier(world)

    def one(rank: int) -> Any:
        try:
            with torch.no_grad():
                return work(Threads(rank, world, CPU, shelf=shelf, all_here=all_here))
        except BaseException:
            all_here.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def load(directory: Path, group: Group | None = None, **options: Any) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32, group=group, **options)


def same_logits(directory: Path, world: int, tolerance: float = 1e-5, **options: Any) -> list[Decoder]:
    """The parts, which have computed what the whole model does."""
    with torch.no_grad():
        expected = load(directory, **options)(TOKENS)
    got = together(world, lambda group: (model := load(directory, group, **options), model(TOKENS)))
    for _, logits in got:
        assert torch.equal(logits, got[0][1])
    assert (got[0][1] - expected).abs().max() <= tolerance * expected.abs().max()
    return [model for model, _ in got]
