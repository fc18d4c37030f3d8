"""llama.cpp as a peer of `cpu_decode.py`, in a process of its own: a random model of the same shape, and its times.

    python benchmarks/cpu_decode_llama.py MODEL.gguf --shape JSON --head Q8_0

`cpu_decode.py --llama PYTHON` starts it with a Python that has `llama-cpp-python` and `gguf`. It writes the model file,
prints a line when it is ready, and answers each line that it reads, `decode TOKENS` or `prompt TOKENS`, with seconds.
"""

import argparse
import ctypes
import importlib.metadata
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

CONTEXT = 2048
# The bytes of a block of 32 weights: a scale of 16 bits, and codes.
BLOCK_BYTES = {"Q4_0": 18, "Q8_0": 34}


@dataclass(frozen=True)
class Shape:
    """Of a Llama model."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int


def write_model(path: Path, shape: Shape, head: str) -> None:
    """A model file with random weights: matrices and embedding in Q4_0, the head in `head`, norms in float32."""
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, kind: str = "Q4_0") -> None:
        blocks = random.integers(0, 256, (rows, columns // 32, BLOCK_BYTES[kind]), dtype=np.uint8)
        spread = {"Q4_0": 4.6, "Q8_0": 74.0}[kind]  # of equally likely codes
        scales = random.uniform(0.5, 1.5, blocks.shape[:2]) / spread * columns**-0.5
        blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, dtype=np.float32))

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    size = shape.hidden // shape.heads
    matrix("token_embd.weight", shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        norm(f"blk.{layer}.attn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", shape.hidden, shape.hidden)
        matrix(f"blk.{layer}.attn_k.weight", shape.kv_heads * size, shape.hidden)
        matrix(f"blk.{layer}.attn_v.weight", shape.kv_heads * size, shape.hidden)
        matrix(f"blk.{layer}.attn_output.weight", shape.hidden, shape.hidden)
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.ffn_gate.weight", shape.ffn, shape.hidden)
        matrix(f"blk.{layer}.ffn_up.weight", shape.ffn, shape.hidden)
        matrix(f"blk.{layer}.ffn_down.weight", shape.hidden, shape.ffn)
    norm("output_norm.weight")
    matrix("output.weight", shape.vocabulary, shape.hidden, head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    """The model, loaded, with one sequence.

    Args:
        vocabulary: its size.
    """

    def __init__(self, path: Path, threads: int, vocabulary: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, CONTEXT, 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._vocabulary = vocabulary

    def prompt(self, tokens: int) -> float:
        """Seconds to read a new prompt of so many tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        return self._read(np.random.randint(0, self._vocabulary, tokens).tolist())

    def decode(self, tokens: int) -> float:
        """Seconds to append so many tokens, each the most likely one."""
        start = time.perf_counter()
        for _ in range(tokens):
            logits = llama_cpp.llama_get_logits(self._context)
            best = int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())
            self._read([best])
        return time.perf_counter() - start

    def _read(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp failed to decode")
        return time.perf_counter() - start


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:  # noqa: N802
    del level, text, data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the file to write")
    parser.add_argument("--shape", required=True, help="the fields of Shape, as JSON")
    parser.add_argument("--head", choices=list(BLOCK_BYTES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    shape = Shape(**json.loads(options.shape))
    write_model(options.model, shape, options.head)
    model = Model(options.model, options.threads, shape.vocabulary)
    print(importlib.metadata.version("llama-cpp-python"), flush=True)
    for line in sys.stdin:
        what, tokens = line.split()
        print({"decode": model.decode, "prompt": model.prompt}[what](int(tokens)), flush=True)


if __name__ == "__main__":
    main()
