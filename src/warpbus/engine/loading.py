"""Creates an engine from a model directory: plans its memory and loads the weights."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpbus.cuda.devices import default_dtype, resolve_dtype
from warpbus.cuda.memory_size import parse_memory
from warpbus.cuda.rates import card_of
from warpbus.cuda.remote import remote_backend
from warpbus.dist import Group
from warpbus.engine.adapters import Adapter, adapt, cut, stacked_bytes
from warpbus.engine.blocks import BLOCK
from warpbus.engine.disk_cache import DiskSpace, check_limit, check_writable
from warpbus.engine.engine import Engine
from warpbus.engine.fingerprint import kv_fingerprint
from warpbus.engine.forecast import forecast_plan
from warpbus.engine.host_cache import check_memory
from warpbus.engine.kv_cache import chosen_dtype, token_bytes
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.options import ServiceOptions, parse_latency
from warpbus.engine.plan import (
    PLANNED_GRAPHS,
    PLANNED_ROWS,
    MemoryPlan,
    Stored,
    check_host_memory,
    enforce,
    plan_memory,
)
from warpbus.engine.prefixes import Prefixes
from warpbus.engine.speculation import Speculation
from warpbus.engine.step import MIXED_ROWS
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.hub import find_model
from warpbus.kernels.ops.cpu_library import activations_in_8_bits
from warpbus.models import ModelConfig, Progress, check_loadable, load_model, read_config
from warpbus.models.adapters import load_adapter
from warpbus.models.kv_scales import kv_cache_scheme
from warpbus.models.layers.activation_dtype import round_activations
from warpbus.models.loading import quantized_parameters
from warpbus.models.parallel import Part
from warpbus.models.stored_schemes import dtype_of_weights
from warpbus.qtensor import Scheme

_log = logging.getLogger("warpbus.engine")

_CPU_HEAD = Scheme(8, 128)


@dataclass(frozen=True)
class OpenedModel:
    """A model whose config and file headers are read, but no weights.

    Attributes:
        dtype: of the activations and of unquantized weights.
        max_model_len: the most tokens of a prompt with its answer; the memory may limit it further.
        plan: the memory plan, if the options give a memory.
        adapters: that requests can name, on the CPU.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    plan: MemoryPlan | None
    adapters: tuple[Adapter, ...] = ()


def open_model(
    model: str | Path, device: torch.device, options: ServiceOptions, progress: Progress | None = None
) -> OpenedModel:
    """Read the config of a model directory, and plan its memory if the options give one.

    A model with a hub's name is downloaded unless it is on the disk; `progress` is called meanwhile.

    Raises:
        UsageError: an argument is out of range or not known, or the model does not fit `memory`.
        CheckpointError: the directory is missing, damaged or not understood, or a hub does not give it.
    """
    checkpoint = Checkpoint(find_model(model, progress=progress, check=check_loadable))
    speculation = Speculation.parse(options.speculation)
    config = read_config(checkpoint, mtp="required" if speculation.mtp else "unused")
    stored = dtype_of_weights(checkpoint, config)
    chosen = default_dtype(device, stored) if options.dtype == "auto" else resolve_dtype(options.dtype)
    length = config.max_context if options.max_model_len is None else options.max_model_len
    if not 1 < length <= config.max_context:
        raise UsageError(f"max_model_len is {length:,}: give 2 to {config.max_context:,}, the model's context")
    _check_kept_blocks(config, options)
    # Adapters are small, and their size is known only once they are read.
    adapters = tuple(load_adapter(directory, config, name=name, dtype=chosen) for name, directory in options.adapters)
    prefixes = Prefixes(adapters, config)
    plan = None
    if options.memory is not None:
        if remote_backend(device) is not None:
            raise UsageError(
                f"memory is {options.memory!r}, but {device} is leased with a memory of its own: leave it out, and "
                "give warpbus.pool.connect() that much"
            )
        if device.type != "cuda":
            parse_memory(options.memory, 100 * 2**40)  # a size that is none is the first mistake
            raise UsageError(
                f"--memory {options.memory} limits GPU memory, but this run is on the {device.type.upper()}: leave it "
                "out; `warpbus plan` shows what a GPU would need"
            )
        weights = Stored.of_checkpoint(
            *(checkpoint, config, chosen),
            adapters=stacked_bytes(adapters, chosen),
            prefix_blocks=prefixes.blocks + prefixes.extra_blocks,
        )
        plan = plan_memory(
            weights,
            parse_memory(options.memory, torch.cuda.get_device_properties(device).total_memory),
            max_model_len=options.max_model_len,
            max_num_seqs=speculation.rows(options.max_num_seqs),
            kv_dtype=options.kv_dtype,
        )
        length = plan.context
        if plan.offloaded:
            check_host_memory(plan)
            with torch.cuda.device(device):
                plan = replace(plan, speed=forecast_plan(weights, card_of(device), plan).speed())
    return OpenedModel(checkpoint, config, device, chosen, length, plan, adapters)


def build_engine(
    opened: OpenedModel,
    options: ServiceOptions,
    *,
    group: Group | None = None,
    progress: Progress | None = None,
    can_sleep: bool = False,
) -> Engine:
    """Load an opened model.

    Args:
        options: the same as for `open_model`.
        group: the processes that share the model; each calls this.
        progress: called while the weights are read; see `warpbus.models.Progress`.
        can_sleep: the engine can `sleep`, unless its memory is planned, which leaves no room to move the weights, or
            its device is remote.

    Raises:
        UsageError: an option does not fit the model.
        DeviceError: the device's memory is full, or other programs use the planned memory.
        CheckpointError: the checkpoint is damaged or not understood.
    """
    plan = opened.plan
    host_bytes, disk = _host_bytes(opened, options, group), _disk_space(opened, options)
    _check_limits(opened, options, group, host_bytes, disk)
    # Graphs use memory: with limited memory few are kept.
    limited = plan is not None or remote_backend(opened.device) is not None
    if plan is not None:
        enforce(plan, opened.device)
    decoder = load_model(
        opened.checkpoint,
        device=opened.device,
        dtype=opened.dtype,
        progress=progress,
        head=_cpu_head(opened) if plan is None else plan.head,
        embedding=None if plan is None else plan.embedding,
        embedding_device="cpu" if plan is not None and plan.embedding_on_cpu else None,
        group=group,
        expert_parallel=options.expert_parallel,
        mtp=opened.config.mtp is not None,
        offloaded=() if plan is None else plan.offloaded,
        int8_activations=activations_in_8_bits(),
    )
    round_activations(decoder, options.activation_dtype)
    adapters = opened.adapters
    if group is not None and group.world > 1:
        part = Part(opened.config, group.rank, group.world, options.expert_parallel)
        adapters = tuple(cut(adapter, part) for adapter in adapters)
    # Before the weights move to the arena: those of the adapters are offloaded with them.
    adapt(decoder, adapters)
    engine = Engine(
        decoder,
        max_model_len=options.max_model_len if plan is None else plan.context,
        max_num_seqs=options.max_num_seqs,
        kv_dtype=options.kv_dtype if plan is None else plan.kv_dtype,
        max_num_batched_tokens=options.max_num_batched_tokens or (None if plan is None else plan.prefill_tokens),
        inter_token_latency=None if options.inter_token_latency is None else parse_latency(options.inter_token_latency),
        cache_tokens=_cache_tokens(opened, options) if plan is None else plan.pool_tokens,
        mixed_rows=PLANNED_ROWS if limited else MIXED_ROWS,
        most_graphs=PLANNED_GRAPHS if limited else None,
        prefix_caching=options.prefix_caching,
        host_bytes=host_bytes,
        disk=disk,
        speculation=options.speculation,
        offloadable=OffloadableModel(decoder) if can_sleep and not limited else None,
        adapters=adapters,
    )
    engine.plan = plan
    if engine.kv_kind is not None and options.kv_dtype == "auto":
        _log.info("KV cache: %s", engine.kv_kind)
    return engine


def _cpu_head(opened: OpenedModel) -> Scheme | None:
    """The scheme that the head of a quantized model is rounded to on a CPU, where each token would read it in float32.

    None if the file has the head, or the embedding that it is tied to, quantized, the layers are not quantized, or on a
    GPU.
    """
    if opened.device.type != "cpu" or not activations_in_8_bits():
        return None
    schemes = quantized_parameters(opened.checkpoint, opened.config)
    end = "embedding.weight" if opened.config.tie_embeddings else "head.weight"
    if end in schemes or all(scheme.activations is not None for scheme in schemes.values()):
        return None
    return _CPU_HEAD.fitting(opened.config.hidden_size)


def _cache_tokens(opened: OpenedModel, options: ServiceOptions) -> int | None:
    """The size of the cache: whole blocks, no more than all requests can need. None: the engine's default."""
    if options.cache_tokens is None:
        return None
    each = -(-opened.max_model_len // BLOCK)
    return BLOCK * min(-(-options.cache_tokens // BLOCK), options.max_num_seqs * each)


def _host_bytes(opened: OpenedModel, options: ServiceOptions, group: Group | None) -> int | None:
    """Main memory of this process for evicted blocks: each process that shares the model has a part of every block."""
    if options.kv_host_memory is None:
        return None
    return parse_memory(options.kv_host_memory, what="kv_host_memory") // (1 if group is None else group.world)


def _disk_space(opened: OpenedModel, options: ServiceOptions) -> DiskSpace | None:
    if options.kv_disk is None:
        return None
    nbytes = parse_memory(options.kv_disk_size, what="kv_disk_size")
    return DiskSpace(Path(options.kv_disk).expanduser(), nbytes, kv_fingerprint(opened, options))


def _check_limits(
    opened: OpenedModel, options: ServiceOptions, group: Group | None, host_bytes: int | None, disk: DiskSpace | None
) -> None:
    """Check that a block fits the limits of what is evicted, before the weights are read.

    Raises:
        UsageError: it does not.
    """
    config = opened.config
    if group is not None and group.world > 1:
        config = Part(config, group.rank, group.world, options.expert_parallel).config
    kv_dtype = chosen_dtype(options.kv_dtype, kv_cache_scheme(opened.checkpoint, opened.config))
    if opened.plan is not None:
        kv_dtype = opened.plan.kv_dtype
    block_bytes = BLOCK * token_bytes(config, opened.dtype, kv_dtype)
    if host_bytes is not None:
        check_memory(host_bytes, block_bytes)
    if disk is not None:
        check_limit(disk, block_bytes)


def _check_kept_blocks(config: ModelConfig, options: ServiceOptions) -> None:
    """Check where evicted blocks are to be kept, before the model is loaded.

    Raises:
        UsageError: the model's prompts have no prefixes that could be found again.
        StorageError: the directory cannot be used.
    """
    for what in ("kv_host_memory", "kv_disk"):
        if getattr(options, what) is not None:
            _check_findable(config, what)
    if options.kv_disk is not None:
        check_writable(Path(options.kv_disk).expanduser())


def _check_findable(config: ModelConfig, what: str) -> None:
    if config.prompt_end is not None:
        raise UsageError(f"{what}: this model reads its prompts in both directions, so no prefix can be found again")


def load_engine(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Engine:
    """Load and warm an engine: the `LoadEngine` of a `Service`.

    Raises: as `open_model` and `build_engine`.
    """
    if options.memory is not None and group.world > 1:
        raise UsageError(f"memory is {options.memory!r}, which plans one GPU's: leave it out with {group.world} GPUs")
    opened = open_model(model, group.device, options)
    engine = build_engine(opened, options, group=group, progress=progress, can_sleep=True)
    engine.warm(rows=options.max_num_seqs)
    return engine
