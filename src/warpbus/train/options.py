"""The hyperparameters of a training run. The command line reads them, and therefore this module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrainingOptions:
    """Hyperparameters of a run; `TrainingSettings` checks them.

    Attributes:
        method: "full" trains all weights; "lora" trains low-rank adapters (Hu et al., 2021, arXiv:2106.09685), which is
            QLoRA on a quantized base (Dettmers et al., 2023, arXiv:2305.14314); "ptuning" trains a prefix of keys and
            values (P-Tuning v2; Liu et al., 2021, arXiv:2110.07602).
        steps: optimizer steps; 0 means `epochs` passes over the data.
        epochs: passes over the data if `steps` is 0; the number of steps is rounded up.
        length: tokens per row; longer documents are truncated.
        rows_per_step: rows per optimizer step, over all processes.
        rows_at_once: rows per forward pass of a process (micro-batch); gradients are accumulated.
        learning_rate: peak value, after a linear warm-up of `warmup` steps; a cosine decays it to
            `final_rate * learning_rate`. None: 200 steps of "full" and 20 of adapters, but at most a tenth of all.
        weight_decay: of matrices; biases and norms have none.
        clip: maximum gradient norm.
        balance_speed: of "full", for routers with a correction bias: what the bias of each expert changes by per step,
            so that all experts get the same number of tokens (`warpbus.train.balance`).
        mtp_weight: of "full": the weight of the loss of multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437,
            section 2.2, trains with 0.3, later 0.1), which is added to that of the next token. 0: the layer that drafts
            is neither trained nor written.
        compile: use `torch.compile` for the layers (`warpbus.train.compiling`).
        dtype: "bfloat16" for mixed precision, or "float32". Trained parameters and optimizer states are float32;
            frozen weights have this dtype.
        fp8: multiply the matrices of the layers in FP8 (`warpbus.train.fp8`).
        recompute: recompute the activations of every n-th layer in the backward pass (activation checkpointing); 0: of
            no layer.
        sharding: "ddp": each process has the whole model; "fsdp": each has a shard of all weights, gradients and
            optimizer states (FSDP2).
        valid_every, save_every: steps between validations and between checkpoints.
        keep: the weights to write: "last", after the last step, or "best", after the step with the lowest validation
            loss.
        seed: of initial weights, shuffling and dropout.
        rank, alpha, dropout, targets: of "lora": the rank, the scaling times the rank, the dropout rate of the inputs,
            and the names of the matrices (all by default).
        prefix_tokens: of "ptuning": length of the prefix in tokens.
        quantize: of "lora" and "ptuning": a scheme such as "w4a16-g64" that the matrices of the layers are rounded to
            while loading. Not for models that are quantized already.
        least: the lower limits of numbers.
    """

    method: str = "full"
    steps: int = 0
    epochs: float = 1.0
    length: int = 512
    rows_per_step: int = 128
    rows_at_once: int = 128
    learning_rate: float = 1e-3
    final_rate: float = 0.05
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    balance_speed: float = 1e-3
    mtp_weight: float = 0.0
    compile: bool = False
    dtype: str = "float32"
    fp8: bool = False
    recompute: int = 0
    sharding: str = "ddp"
    valid_every: int = 250
    save_every: int = 500
    keep: str = "last"
    seed: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    prefix_tokens: int = 64
    quantize: str | None = None

    least: ClassVar[Mapping[str, int]] = {
        "steps": 0,
        "length": 2,
        "rows_per_step": 1,
        "rows_at_once": 1,
        "warmup": 0,
        "valid_every": 1,
        "save_every": 1,
        "seed": 0,
        "learning_rate": 0,
        "final_rate": 0,
        "weight_decay": 0,
        "rank": 1,
        "prefix_tokens": 1,
        "recompute": 0,
        "dropout": 0,
        "balance_speed": 0,
        "mtp_weight": 0,
    }
