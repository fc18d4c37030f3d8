"""Stand-alone CUDA programs on the CPU: the examples, what they print, and mistakes that are explained."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cuda import programs
from warpbus.cuda.cpu import find_compiler
from warpbus.cuda.findings import explain
from warpbus.errors import DataError, DeviceError, UsageError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "cuda"

START = "#include <cuda_runtime.h>\n#include <cstdio>\n"
ADD = (EXAMPLES / "vector_add.cu").read_text(encoding="utf-8")
MULTIPLY = (EXAMPLES / "matrix_multiply.cu").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    shutil.copy(EXAMPLES / "check.h", tmp_path)

    def run_text(text: str, *arguments: str, order: str = "forward") -> programs.ProgramRun:
        source = tmp_path / "program.cu"
        source.write_text(text, encoding="utf-8")
        return programs.run_in_orders(source, arguments, orders=(order,))[0]

    return run_text


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vector_add", ["1000000 elements, 3907 blocks of 256 threads: all match the CPU"]),
        (
            "matrix_add",
            [
                "20 x 30, one block: all match the CPU",
                "300 x 500, 16 x 38 blocks of 32 x 8 threads: all match the CPU",
            ],
        ),
        (
            "matrix_multiply",
            [
                "naive, n = 100: all match the CPU",
                "tiled, n = 100: all match the CPU",
                "156 products of 8 x 8 in one launch: all match the CPU",
            ],
        ),
        ("reduction", ["tree: 299967, matches the CPU", "shuffles: 299967, matches the CPU"]),
        (
            "softmax",
            [
                "softmax without the maximum: 50 of 50 rows have NaN",
                "softmax in one pass: all match the CPU",
                "RMSNorm: all match the CPU",
            ],
        ),
        (
            "convolution",
            [
                "image 14400 bytes, its columns 27 x 1200: 129600 bytes",
                "direct: all match the CPU",
                "im2col and product: all match the CPU",
            ],
        ),
        (
            "streams",
            [
                "one stream: all match the CPU",
                "three streams: all match the CPU",
                "an event between two streams: all match the CPU",
                "a graph of 20 kernels: all match the CPU",
            ],
        ),
        (
            "roofline",
            [
                "1 multiply-add             8.0 bytes,    2.0 operations per element, 0.25 operations per byte",
                "16 multiply-adds           8.0 bytes,   32.0 operations per element, 4 operations per byte",
                "256 multiply-adds          8.0 bytes,  512.0 operations per element, 64 operations per byte",
                "three kernels             24.0 bytes,    3.0 operations per element, 0.125 operations per byte",
                "fused                      8.0 bytes,    3.0 operations per element, 0.375 operations per byte",
                "all match the CPU",
            ],
        ),
        (
            "paged_cache",
            ["40 tokens in 3 of 8 blocks, 132 bytes per vector instead of 256: all within half a step"],
        ),
        (
            "all_reduce",
            [
                "one shot: all match the CPU, the same bits on every rank",
                "ring: all match the CPU, the same bits on every rank",
            ],
        ),
        (
            "tensor_parallel",
            [
                "rank 0: rows 0 to 6911 of the first matrix, the same columns of the second, 54 groups",
                "rank 1: rows 6912 to 13695 of the first matrix, the same columns of the second, 53 groups",
                "the sum of both: all match the CPU",
            ],
        ),
        ("image_filter", ["150 x 100 pixels, 738 of them on an edge: all match the CPU"]),
        ("heat", ["60 x 90 points, 50 steps, 26.6 degrees in the middle of row 5: all match the CPU"]),
        ("register_tiles", ["n = 150, 2 x 2 blocks, 8 x 8 elements per thread: all match the CPU"]),
        (
            "int4_gemv",
            [
                "57600 bytes instead of 409600, the product changes by 8.4 %",
                "one thread per row: all match the CPU",
                "one warp per row: all match the CPU",
            ],
        ),
        (
            "one_block",
            [
                "<<<1, 1>>>: no error, the last element is 0",
                "<<<1, 1000>>>: no error, the last element is 998001",
                "<<<1, 1024>>>: no error, the last element is 1046529",
                "<<<1, 1025>>>: invalid configuration argument",
                "<<<1, 500000>>>: invalid configuration argument",
            ],
        ),
        (
            "tensor_cores",
            [
                "wmma                     n = 128, wrong: 0",
                "mma                      n = 128, wrong: 0",
                "mma, ldmatrix, cp.async  n = 128, wrong: 0",
            ],
        ),
        ("hopper", ["TMA, wgmma, n = 384, wrong: 0"]),
    ],
)
def test_examples(name: str, expected: list[str]) -> None:
    for found in programs.run_in_orders(EXAMPLES / f"{name}.cu"):
        assert (found.output.splitlines(), found.errors, found.code) == (expected, "", 0)


def test_a_query_of_the_device() -> None:
    (found,) = programs.run_in_orders(EXAMPLES / "device_query.cu", orders=("forward",))
    assert "  threads per block, at most   1024\n" in found.output
    assert "  block, at most               1024 x 1024 x 64\n" in found.output


def test_every_example_is_tested_and_documented() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "cuda_programs.md", ROOT / "docs" / "zh" / "cuda_programs.md"):
        document = page.read_text(encoding="utf-8")
        for path in EXAMPLES.glob("*.cu"):
            assert path.stem in text
            assert f"examples/cuda/{path.name}" in document


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            changed(ADD, "if (i < n) c[i]", "c[i]"),
            "kernel add, block (3906, 0, 0), thread (64, 0, 0): accesses d_a[1000000] (line 12), but d_a has 1000000 "
            "elements of 4 bytes: the last valid index is 999999.",
        ),
        (changed(ADD, "wrong += c[i]", "wrong += d_c[i]"), "device memory (d_c, 4000000 bytes) (line 41): copy"),
        (changed(ADD, "c[i] = a[i]", "c[i ? i : -1] = a[i]"), "kernel add wrote d_c[-1], which is before the begin"),
        (changed(ADD, "d_c, n);", "nullptr, n);"), "thread (0, 0, 0): access through a null pointer (line 12): let it"),
        (changed(ADD, "d_c, n);", "(float *)0x10000000000, n);"), "thread (0, 0, 0): access to address 0x10000000000"),
        (
            changed(MULTIPLY, "    float sum = 0;\n    for (int first", "    if (column >= n) return;\n"
                    "    float sum = 0;\n    for (int first"),
            "kernel tiled, block (6, 0, 0): 64 threads wait at __syncthreads() (line 33), but 192 have returned",
        ),
    ],
)  # fmt: skip
def test_wrong_programs_are_explained(run, text: str, said: str) -> None:
    found = run(text)
    assert found.mistake is not None
    assert said in explain(found.mistake)
    assert re.search("[\u4e00-\u9fff]", explain(found.mistake, "zh"))
    assert found.code == 70


def test_a_write_into_the_padding_is_found(run) -> None:
    found = run(
        START + "__global__ void k(char *x) { x[5] = 1; }\n"
        "int main() { char *x; cudaMalloc(&x, 5); k<<<1, 1>>>(x); return 0; }\n"
    )
    assert found.mistake is not None
    assert explain(found.mistake).startswith(
        "kernel k wrote x[5], but x has 5 elements of 1 byte: the last valid index is 4"
    )


STREAMS = (
    START + "__global__ void set(int *x, int value) { *x = value; }\n"
    "__global__ void twice(int *x) { *x *= 2; }\n"
    "int main() {\n"
    "    int *x, *y; cudaStream_t a, b; cudaEvent_t done; cudaGraph_t graph; cudaGraphExec_t exec; size_t nodes;\n"
    "    cudaMalloc(&x, 4); cudaMallocHost(&y, 4); *y = 7;\n"
    "    cudaStreamCreate(&a); cudaStreamCreate(&b); cudaEventCreate(&done);\n"
)


def statements(run, text: str, order: str = "forward") -> str:
    found = run(STREAMS + text + '\n    printf("%d", *y); return 0; }\n', order=order)
    assert (found.code, found.errors, found.mistake) == (0, "", None)
    return found.output


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        # Read before the stream is done; after it; a copy to pageable memory waits.
        ("set<<<1, 1, 0, a>>>(x, 1); cudaMemcpyAsync(y, x, 4, cudaMemcpyDeviceToHost, a);", "7"),
        (
            "set<<<1, 1, 0, a>>>(x, 1); cudaMemcpyAsync(y, x, 4, cudaMemcpyDeviceToHost, a); cudaStreamSynchronize(a);",
            "1",
        ),
        ("int z = 7; set<<<1, 1, 0, a>>>(x, 1); cudaMemcpyAsync(&z, x, 4, cudaMemcpyDeviceToHost, a); *y = z;", "1"),
        # The driver takes the bytes of pageable memory before it returns, and reads pinned memory later.
        (
            "int z = 3; cudaMemcpyAsync(x, &z, 4, cudaMemcpyHostToDevice, a); z = 4; cudaStreamSynchronize(a);"
            "cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost);",
            "3",
        ),
        (
            "cudaMemcpyAsync(x, y, 4, cudaMemcpyHostToDevice, a); *y = 4; cudaStreamSynchronize(a);"
            "*y = 0; cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost);",
            "4",
        ),
        # The second stream waits for an event of the first.
        (
            "set<<<1, 1, 0, a>>>(x, 1); cudaEventRecord(done, a); cudaStreamWaitEvent(b, done, 0);"
            "twice<<<1, 1, 0, b>>>(x); cudaStreamSynchronize(b); cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost);",
            "2",
        ),
        # A graph with a second stream that is joined: captured once, launched twice.
        (
            "set<<<1, 1>>>(x, 1); cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal); twice<<<1, 1, 0, a>>>(x);"
            "cudaEventRecord(done, a); cudaStreamWaitEvent(b, done); twice<<<1, 1, 0, b>>>(x);"
            "cudaEventRecord(done, b); cudaStreamWaitEvent(a, done); cudaStreamEndCapture(a, &graph);"
            "cudaGraphGetNodes(graph, nullptr, &nodes); cudaGraphInstantiate(&exec, graph, 0);"
            "cudaGraphLaunch(exec, a); cudaGraphLaunch(exec, a); cudaStreamSynchronize(a);"
            "cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost); *y += 100 * nodes;",
            "216",
        ),
        # Work that the first stream does not wait for, and a call that a capture does not allow.
        (
            "cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal); cudaEventRecord(done, a);"
            "cudaStreamWaitEvent(b, done); twice<<<1, 1, 0, b>>>(x); *y = cudaStreamEndCapture(a, &graph);",
            "904",
        ),
        (
            "cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal); *y = cudaDeviceSynchronize();"
            "*y = *y * 1000 + cudaStreamEndCapture(a, &graph);",
            "900901",
        ),
    ],
)
def test_streams_events_and_graphs(run, text: str, printed: str, order: str) -> None:
    assert statements(run, text, order) == printed


def test_a_stream_that_forgets_an_event_depends_on_the_order(run) -> None:
    text = "set<<<1, 1>>>(x, 5); set<<<1, 1, 0, a>>>(x, 1); twice<<<1, 1, 0, b>>>(x); cudaDeviceSynchronize();"
    text += "cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost);"
    assert statements(run, text) != statements(run, text, "reverse")


def test_statuses_of_the_runtime(run) -> None:
    wrong = changed(ADD, "d_a, a, bytes, cudaMemcpyHostToDevice", "d_a, a, bytes, cudaMemcpyDeviceToHost")
    found = run(wrong)
    assert found.errors.endswith(": invalid argument\n")
    assert "program.cu:31: cudaMemcpy(d_a, a, bytes, cudaMemcpyDeviceToHost)" in found.errors
    assert found.code == 1
    long = changed(ADD, "cudaMemcpy(d_b, b, bytes", "cudaMemcpy(d_b, b, bytes + 4")
    assert run(long).errors.endswith(": invalid argument\n")
    freed = changed(ADD, "CHECK(cudaFree(d_c))", "CHECK(cudaFree(d_b))")
    assert run(freed).errors.endswith(": invalid argument\n")


def test_shapes_of_blocks_templates_and_arguments(run) -> None:
    text = START + (
        "template <int kScale, class T> __global__ void fill(T *x, int3_t unused) {\n"
        "    const int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);\n"
        "    x[i] = kScale * i + blockIdx.z; }\n"
        "int twice(int a, int b) { return a + b; }\n"
        'int main() { int *x, y[24]; cudaMalloc(&x, sizeof y); const char *text = "a<<<b";\n'
        "    fill<3, int><<<dim3(1, 1, 2), dim3(twice(1, 1), 3, 4)>>>(x, (1 + 1)); // fill<<<1, 1>>>(\n"
        "    cudaMemcpy(y, x, sizeof y, cudaMemcpyDeviceToHost);\n"
        '    printf("%d %d %s", y[0], y[23], text); return cudaGetLastError(); }\n'
    ).replace("int3_t", "int")
    found = run(text)
    assert (found.output, found.code) == ("1 70 a<<<b", 0)


def test_a_missing_barrier_depends_on_the_order(run) -> None:
    without = changed(MULTIPLY, "__syncthreads();  // the tiles are complete", "// the tiles are complete")
    assert "elements are wrong" in run(without).output
    assert run(without).output != run(without, order="reverse").output


def test_arguments_reach_the_program(run) -> None:
    assert run(ADD, "10").output == "10 elements, 1 blocks of 256 threads: all match the CPU\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (START + "int main() { k<<<1, 1>>>; }\n", r"line 3: expected a launch such as kernel<<<grid, block>>>"),
        (START + "int main() { k<<<1, 1>>>(x; }\n", r"line 3: the parenthesis of a launch is not closed"),
    ],
)
def test_what_is_no_program(run, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        run(text)


KERNEL = "__global__ void k(float *x) { x[0] = 1; }\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "int main() { return undefined; }\n",
            "the compiler rejects the program (line 1): 'undefined' was not declared",
        ),
        ("int main() { return 1 }\n", "(line 1): expected ';' before '}' token. The statement is not complete"),
        ("int main() { return 1;\n", "the braces do not match: the file has 1 { and 0 }"),
        ('#include "none.h"\nint main() {}\n', "(line 1): none.h: No such file or directory"),
        (KERNEL + "int main() { float *x; return x[0][1]; }\n", "(line 2): invalid types 'float[int]' for array"),
        (KERNEL + "int main() { const float x = 1; x = 2; }\n", "read-only variable 'x'. It is const: the kernel may"),
        (
            "int main() { std::vector<int> x; }\n",
            "'vector' is not a member of 'std'. Include the header of the standard",
        ),
        ("__global__ void k(float *x) { return 1; }\nint main() {}\n", ". A kernel returns nothing"),
        (
            "void k(float *x) {}\nint main() { k<<<1, 2>>>(nullptr); }\n",
            "k is launched with <<<...>>>, but is not a kernel (line 1): write __global__ before its type",
        ),
        (
            "namespace own {\nfloat twice(float x) { return 2 * x; }\n}\nusing own::twice;\n"
            "__global__ void __launch_bounds__(32) k(float *x) {\n    x[0] = twice(x[0]);\n}\n"
            "int main() { k<<<1, 1>>>(nullptr); }\n",
            "a kernel calls twice (line 6), which is a function of the host (line 2): write __device__ before its type",
        ),
        (
            KERNEL + "int main() {\n    k(nullptr);\n}\n",
            "the kernel k is called without <<<blocks, threads>>> (line 3): a kernel has to be launched",
        ),
    ],
)
def test_what_a_compiler_rejects_is_explained(run, text: str, said: str) -> None:
    found = run(text)
    assert (found.output, found.code) == ("", 1)
    assert found.mistake
    assert said in explain(found.mistake)
    assert re.search(r"编译器|花括号|核函数", explain(found.mistake, "zh"))


def test_functions_of_the_device_are_no_mistake(run) -> None:
    text = (
        "struct Size {\n    int number() const { return 1; }\n};\n"
        "__device__ float ahead(float x);\n"
        "template <class T> __device__ T twice(T x) { return 2 * ahead(x); }\n"
        "__device__ float ahead(float x) { return x; }\n"
        "#define NOTHING(x) { x; }\n"
        "float number(float x) { return x; }  // called by the host only\n"
        'extern "C" __global__ void k(float *x) {\n    Size size;\n    x[0] = twice<float>(size.number());\n}\n'
        "int main() {\n    float *x;\n    cudaMalloc(&x, 4);\n    k<<<1, 1>>>(x);\n    float y = 0;\n"
        '    cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost);\n    printf("%g", number(y));\n}\n'
    )
    found = run(START + text)
    assert (found.mistake, found.output) == (None, "2")


@pytest.mark.parametrize(
    ("capability", "option"), [((9, 0), "-arch=sm_90a"), ((8, 0), "-arch=native"), ((10, 0), "-arch=native")]
)
def test_a_hopper_gets_its_own_instructions(capability: tuple[int, int], option: str, monkeypatch) -> None:
    monkeypatch.setattr(programs.driver, "library", lambda: SimpleNamespace(cuInit=lambda flags: 0))
    numbers = dict(zip((programs.driver.CAPABILITY_MAJOR, programs.driver.CAPABILITY_MINOR), capability, strict=True))
    monkeypatch.setattr(programs.driver, "attribute", lambda which, device: numbers[which])
    assert programs._architecture() == option


def test_compilers_that_are_missing(monkeypatch, tmp_path) -> None:
    find_compiler.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler was found .*: install g\+\+"):
        programs.run_in_orders(EXAMPLES / "vector_add.cu")
    monkeypatch.setattr(programs, "_driver_finds_gpu", lambda: True)
    with pytest.raises(DeviceError, match="needs nvcc, which was not found"):
        programs.run_on_gpu(EXAMPLES / "vector_add.cu")
    monkeypatch.setattr(programs, "_driver_finds_gpu", lambda: False)
    with pytest.raises(DeviceError, match="no GPU was found on this machine: give --device cpu"):
        programs.run_on_gpu(EXAMPLES / "vector_add.cu")
    monkeypatch.undo()
    find_compiler.cache_clear()
    with pytest.raises(DataError, match=r"none\.cu: there is no such file"):
        programs.run_in_orders(tmp_path / "none.cu")


def invoke(*words: str):
    return CliRunner().invoke(app, ["cuda", "run", *words], catch_exceptions=False)


def test_the_command(tmp_path) -> None:
    found = invoke("--device", "cpu", "--check", str(EXAMPLES / "vector_add.cu"), "1000")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == [
        "1000 elements, 4 blocks of 256 threads: all match the CPU",
        "no mistake was found; the same output with the threads in reverse order",
    ]
    with pytest.raises(UsageError, match="--check compares orders of threads on the CPU"):
        invoke("--device", "cuda", "--check", str(EXAMPLES / "vector_add.cu"))
    with pytest.raises(UsageError, match="choose from auto, cpu, cuda"):
        invoke("--device", "gpu", str(EXAMPLES / "vector_add.cu"))
    shutil.copy(EXAMPLES / "check.h", tmp_path)
    source = tmp_path / "race.cu"
    source.write_text(changed(MULTIPLY, "__syncthreads();  // the tiles", "// the tiles"), encoding="utf-8")
    assert invoke("--device", "cpu", str(source)).exit_code == 1
    with pytest.raises(DataError, match=r"race\.cu: kernel tiled, .* a race on shared memory: thread"):
        invoke("--device", "cpu", "--check", str(source))
