"""Exercises of the tutorial: kernels to fill in, and tests that compare them with a reference.

`exercise_files/NN_M_name.cu` is what the reader gets, `NN_M_name.test.cu` the test. `programs` runs both on the CPU,
with each access to memory checked, and on a GPU with nvcc also against the clock.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda.cards import CARDS
from warpbus.cuda.findings import LANGUAGES, Finding, explain
from warpbus.cuda.programs import has_gpu, run_in_orders, run_on_gpu
from warpbus.errors import DataError, UsageError
from warpbus.language import in_language, translated

_FILES = Path(__file__).parent / "exercise_files"
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

LIMIT = 20
"""Seconds of CPU time that a run of a test may take."""

_MOST_SECTORS = 1.2
"""Sectors of 32 bytes that coalesced accesses may move, for each that the bytes fill."""

_WORDS = {
    "reverse": (
        " (found with the threads in reverse order: the result depends on the order)",
        "（在线程倒序执行时发现：结果依赖线程的执行顺序）",
    ),
    "use": ("the result is right, but the exercise is to use {words}", "结果正确，但这个练习要求使用 {words}"),
    "and": (" and ", " 和 "),
    "sectors": (
        "the result is right, but the accesses to {array} do not coalesce: the warps {verb} {moved} "
        "sectors of 32 bytes where "
        "{least} are enough, {ratio:.1f} times as many{line}: let neighbouring threads access neighbouring elements",
        "结果正确，但对 {array} 的访问没有合并：各线程束共{verb}了 {moved} 个 32 字节扇区，而 {least} "
        "个就够，是其 {ratio:.1f} 倍{line}："
        "请让相邻的线程访问相邻的元素",
    ),
    "banks": (
        "the result is right, but the accesses to {array} have bank conflicts: {moved} passes where "
        "{least} are enough, "
        "{ratio:.1f} times as many{line}: let the threads of a warp access different banks (word number modulo 32)",
        "结果正确，但对 {array} 的访问有 bank 冲突：用了 {moved} 趟，而 {least} 趟就够，是其 {ratio:.1f} 倍{line}："
        "请让一个线程束的线程访问不同的 bank（字编号除以 32 的余数）",
    ),
    "untouched": (
        "the result is right, but {array} is {done}: {moved} sectors of 32 bytes that the exercise does without{line}: "
        "keep these values in registers",
        "结果正确，但{done}了 {array}：多搬运了 {moved} 个 32 字节扇区{line}，"
        "这个练习要求不用它：请把这些值留在寄存器里",
    ),
    "written": ("written", "写"),
    "read back": ("read", "读"),
    "read": ("read", "读"),
    "write": ("write", "写"),
    "line": (" (line {line})", "（第 {line} 行）"),
    "ended": ("the test ended with status {code}", "测试程序以状态 {code} 结束"),
}


def _say(name: str, language: str, **fields: object) -> str:
    return _WORDS[name][LANGUAGES.index(language)].format(**fields)


@dataclass(frozen=True)
class Traffic:
    """The traffic of the accesses to one array, in the test's last case.

    Attributes:
        shared: whether the array is in shared memory.
        moved, least: sectors of 32 bytes, or passes of shared memory's banks: how many, and how few would be enough.
    """

    array: str
    shared: bool
    writes: bool
    moved: int
    least: int

    @property
    def ratio(self) -> float:
        return self.moved / self.least


@dataclass(frozen=True)
class KernelSpeed:
    """A large case on a GPU: bytes per second that it has to read and write, and that GPU's limit if it is known."""

    device: str
    rate: float
    limit: float | None


@dataclass(frozen=True)
class ExerciseCheck:
    """The result of a check.

    Attributes:
        problem: a sentence; None if the solution passes.
        lines: of the source, which the problem is about.
        traffic: of each array, read and written.
        speed: on a GPU with nvcc.
    """

    problem: str | None
    lines: tuple[int, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    speed: KernelSpeed | None = None


@dataclass(frozen=True)
class Exercise:
    """A kernel to fill in.

    Attributes:
        name: chapter and number: "04.1".
        file: the name of the file: "04_1_tiled_product.cu".
        tasks: the kernel's task, in each of `LANGUAGES`.
        words: words that a solution has to contain, so that it practises the chapter's idea.
        coalesced: arrays of device memory whose accesses have to coalesce.
        untouched: arrays of device memory that a solution does without.
        conflict_free: whether accesses to shared memory must have no bank conflicts.
    """

    name: str
    file: str
    tasks: tuple[str, str]
    words: tuple[str, ...] = ()
    coalesced: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    conflict_free: bool = False

    @property
    def chapter(self) -> str:
        return self.name.partition(".")[0]

    @property
    def template(self) -> str:
        """The file as the reader gets it."""
        return (_FILES / self.file).read_text(encoding="utf-8")

    def task(self, language: str) -> str:
        return self.tasks[LANGUAGES.index(language)]

    def check(self, solution: Path, language: str = "en") -> ExerciseCheck:
        """Compile a solution and run its test with both orders of threads; on a GPU, time it.

        Args:
            language: of `findings.LANGUAGES`.

        Raises:
            DataError: the solution cannot be read.
            DeviceError: there is no C++ compiler.
        """
        code = _COMMENTS.sub("", _read(solution))
        # Macros of the solution, such as T or N, must not change the test behind it.
        undefined = "".join(f"#undef {name}\n" for name in _DEFINED.findall(code))
        test = undefined + (_FILES / self.file).with_suffix(".test.cu").read_text(encoding="utf-8")
        try:
            runs = run_in_orders(solution, appended=test, include=_FILES, checks=True, limit=LIMIT)
        except DataError as error:
            with in_language(language):
                return ExerciseCheck(translated(str(error)))
        for found in runs:
            mistake = found.mistake
            if mistake or found.code:
                said = explain(mistake, language) if mistake else _say("ended", language, code=found.code)
                after = _say("reverse", language) if found is not runs[0] else ""
                return ExerciseCheck(said + after, _lines(mistake or {}))
        traffic = _traffic(runs[0].findings)
        missing = [word for word in self.words if word not in code]
        if missing:
            words = _say("and", language).join(missing)
            return ExerciseCheck(_say("use", language, words=words), traffic=traffic)
        for each in traffic:
            if each.array in self.untouched and not each.shared:
                return _needless(each, runs[0].findings, traffic, language)
            wasteful = each.ratio > (1 if each.shared else _MOST_SECTORS)
            if wasteful and (self.conflict_free if each.shared else each.array in self.coalesced):
                return self._wasteful(each, runs[0].findings, traffic, language)
        return ExerciseCheck(None, traffic=traffic, speed=_speed(solution, test) if has_gpu() else None)

    def _wasteful(
        self, each: Traffic, findings: tuple[Finding, ...], traffic: tuple[Traffic, ...], language: str
    ) -> ExerciseCheck:
        """The problem of accesses that move more than they need, with the line of the worst."""
        sites = (site for site in findings if _is_of(site, each))
        worst = max(sites, key=lambda site: int(site["moved"]) - int(site["least"]))
        line = _say("line", language, line=worst["line"]) if "line" in worst else ""
        fields = {"array": each.array, "moved": each.moved, "least": each.least, "ratio": each.ratio, "line": line}
        verb = _say("write" if each.writes else "read", language)
        problem = _say("banks" if each.shared else "sectors", language, verb=verb, **fields)
        return ExerciseCheck(problem, _lines(worst), traffic)


def _needless(
    each: Traffic, findings: tuple[Finding, ...], traffic: tuple[Traffic, ...], language: str
) -> ExerciseCheck:
    """The problem of accesses to an array that a solution does without, with the line of one."""
    site = next(site for site in findings if _is_of(site, each))
    line = _say("line", language, line=site["line"]) if "line" in site else ""
    done = _say("written" if each.writes else "read back", language)
    problem = _say("untouched", language, array=each.array, done=done, moved=each.moved, line=line)
    return ExerciseCheck(problem, _lines(site), traffic)


def _read(solution: Path) -> str:
    try:
        return solution.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{solution}: cannot be read ({error}): give a .cu file") from None


def _lines(finding: Finding) -> tuple[int, ...]:
    return tuple(sorted({finding[key] for key in ("its_line", "line") if finding.get(key)}))


def _is_of(site: Finding, traffic: Traffic) -> bool:
    if site["kind"] != "traffic":
        return False
    found = site["array"], site["memory"] == "shared", bool(site["writes"])
    return found == (traffic.array, traffic.shared, traffic.writes)


def _traffic(findings: tuple[Finding, ...]) -> tuple[Traffic, ...]:
    """The traffic per array: that of all its instructions."""
    sums: dict[tuple[bool, str, bool], tuple[int, int]] = {}
    for site in findings:
        if site["kind"] == "traffic":
            key = site["memory"] == "shared", site["array"], bool(site["writes"])
            moved, least = sums.get(key, (0, 0))
            sums[key] = moved + site["moved"], least + site["least"]
    return tuple(Traffic(array, shared, writes, *sums[shared, array, writes]) for shared, array, writes in sorted(sums))


def _speed(solution: Path, test: str) -> KernelSpeed | None:
    """The solution's speed on the GPU of this machine; None if it does not get so far there.

    Raises:
        DataError: the solution passes on the CPU, but nvcc rejects it.
    """
    found = run_on_gpu(solution, appended=test, include=_FILES)
    if found.mistake:
        raise DataError(f"{solution}: passes on the CPU, but on the GPU {explain(found.mistake)}")
    timing = next((each for each in found.findings if each["kind"] == "timing"), None)
    if timing is None:
        return None
    limit = next((card.bandwidth for card in CARDS.values() if card.device == timing["device"]), None)
    return KernelSpeed(timing["device"], timing["bytes"] / timing["seconds"], limit)


EXERCISES = (
    Exercise(
        "01.1", "01_1_vector_add.cu", ("add two vectors, one element per thread", "两个向量相加，每个线程一个元素")
    ),
    Exercise("01.2", "01_2_launch.cu", ("launch a kernel with as many blocks as needed", "用刚好够的线程块启动核函数")),
    Exercise(
        "02.1",
        "02_1_sigmoid.cu",
        ("the sigmoid of a matrix, with blocks in two dimensions", "用二维线程块对矩阵求 sigmoid"),
        words=("sigmoid(",),
        coalesced=("x", "y"),
    ),
    Exercise(
        "02.2",
        "02_2_mirror.cu",
        ("mirror an image: rows, columns and their order", "左右翻转图像：行、列及其次序"),
        coalesced=("image", "mirrored"),
    ),
    Exercise(
        "03.1",
        "03_1_grid_stride.cu",
        ("scale a vector of any length with a grid of fixed size", "用固定大小的网格缩放任意长的向量"),
        words=("gridDim",),
        coalesced=("x",),
    ),
    Exercise(
        "03.2",
        "03_2_coalescing.cu",
        ("coalesce the accesses of a slow kernel", "让一个慢的核函数合并访问"),
        coalesced=("celsius", "result"),
    ),
    Exercise(
        "03.3",
        "03_3_column_sums.cu",
        ("sum the columns of a matrix with coalesced reads", "用合并的读取对矩阵各列求和"),
        coalesced=("x", "sums"),
    ),
    Exercise(
        "04.1",
        "04_1_tiled_product.cu",
        ("multiply matrices with tiles in shared memory", "用共享内存分块做矩阵乘法"),
        words=("__shared__", "__syncthreads"),
        coalesced=("a", "b", "c"),
    ),
    Exercise(
        "04.2",
        "04_2_transpose.cu",
        ("transpose a matrix without bank conflicts", "没有 bank 冲突的矩阵转置"),
        words=("__shared__", "__syncthreads"),
        coalesced=("x", "y"),
        conflict_free=True,
    ),
    Exercise(
        "04.3",
        "04_3_block_sum.cu",
        ("sum a vector by a tree in shared memory and atomicAdd", "用共享内存树形归约和 atomicAdd 求向量的和"),
        words=("__shared__", "atomicAdd"),
        coalesced=("x",),
        conflict_free=True,
    ),
    Exercise(
        "04.4",
        "04_4_softmax.cu",
        ("softmax of rows, one block per row", "对每一行求 softmax，每行一个线程块"),
        words=("__shared__",),
        coalesced=("x", "y"),
    ),
    Exercise(
        "05.1",
        "05_1_fragments.cu",
        ("fill the fragments of mma and store its sums", "填写 mma 的片段并写回结果"),
        words=("mma(sums, left, right)",),
        coalesced=("c",),
    ),
    Exercise(
        "05.2",
        "05_2_ldmatrix.cu",
        ("load fragments by ldmatrix without bank conflicts", "用 ldmatrix 读取片段，没有 bank 冲突"),
        words=("ldmatrix",),
        coalesced=("a", "b", "c"),
        conflict_free=True,
    ),
    Exercise(
        "05.3",
        "05_3_async_copies.cu",
        ("copy the next tile while this one is summed", "累加当前分块时拷贝下一块"),
        words=("wait<1>",),
        coalesced=("x", "sums"),
        conflict_free=True,
    ),
    Exercise(
        "07.1",
        "07_1_row_sums.cu",
        ("sum rows by shuffles, one warp per row", "用 shuffle 对每一行求和，每行一个线程束"),
        words=("__shfl_",),
        coalesced=("x",),
    ),
    Exercise(
        "07.2",
        "07_2_gemv.cu",
        ("a matrix times a vector, one warp per row", "矩阵乘向量，每行一个线程束"),
        words=("__shfl_",),
        coalesced=("w", "x"),
    ),
    Exercise(
        "07.3",
        "07_3_int4.cu",
        ("turn weights of 4 bits into float32", "把 4 比特权重还原成 float32"),
        coalesced=("weights",),
    ),
    Exercise(
        "07.4",
        "07_4_int4_gemv.cu",
        ("a matrix of 4-bit weights times a vector", "4 比特权重的矩阵乘向量"),
        words=("__shfl_",),
        coalesced=("packed",),
    ),
    Exercise(
        "09.1",
        "09_1_layer_norm.cu",
        ("LayerNorm of rows: a sum of a block, twice", "对每一行做 LayerNorm：两次块内求和"),
        words=("__syncthreads", "block_sum("),
        coalesced=("x", "y"),
    ),
    Exercise(
        "09.2",
        "09_2_online_softmax.cu",
        ("the maximum and sum of softmax in one pass", "一遍扫描求 softmax 的最大值与和"),
        words=("__shfl_",),
        coalesced=("x",),
    ),
    Exercise(
        "10.1",
        "10_1_register_tiles.cu",
        ("multiply matrices with 4 x 4 elements per thread", "矩阵乘法，每个线程算 4 x 4 个元素"),
        words=("__shared__", "__syncthreads"),
        coalesced=("a", "b", "c"),
        conflict_free=True,
    ),
    Exercise(
        "11.1",
        "11_1_round_to_4_bits.cu",
        ("round weights to 4 bits in groups", "把权重分组量化为 4 比特"),
        words=("__shfl_",),
        coalesced=("weights", "codes"),
    ),
    Exercise(
        "12.1",
        "12_1_page_table.cu",
        ("translate addresses by a page table", "用页表翻译地址"),
    ),
    Exercise(
        "13.1",
        "13_1_im2col.cu",
        ("the columns of a convolution, with a border of zeros", "卷积的列矩阵，四周补零"),
        coalesced=("columns",),
    ),
    Exercise(
        "14.1",
        "14_1_merge_splits.cu",
        ("merge the splits of decode attention", "合并解码注意力的各段"),
        coalesced=("o", "out"),
    ),
    Exercise(
        "15.1",
        "15_1_tickets.cu",
        ("work that stops and goes on elsewhere", "可以停下、换个地方继续的工作"),
        words=("__shared__", "__syncthreads", "atomicAdd"),
        coalesced=("x", "y"),
    ),
    Exercise(
        "16.1",
        "16_1_overlap.cu",
        ("overlap copies and kernels in two streams", "用两个流让拷贝与计算重叠"),
        words=("cudaMemcpyAsync",),
    ),
    Exercise(
        "16.2",
        "16_2_graph.cu",
        ("capture two kernels, launch them as a graph", "捕获两个核函数，作为图启动"),
        words=("cudaStreamBeginCapture", "cudaGraphLaunch"),
    ),
    Exercise(
        "17.1",
        "17_1_fuse.cu",
        ("fuse three kernels that are bound by memory", "融合三个受限于显存带宽的核函数"),
        coalesced=("x", "y"),
        untouched=("t",),
    ),
    Exercise(
        "18.1",
        "18_1_append_to_cache.cu",
        ("write tokens to a paged 8-bit KV cache", "把 token 写入分页的 8 比特 KV 缓存"),
        words=("__shared__", "__syncthreads"),
        coalesced=("vectors", "codes"),
    ),
    Exercise(
        "19.1",
        "19_1_one_shot.cu",
        ("add the parts of all ranks in one step", "一步把所有 rank 的部分结果相加"),
        coalesced=("sum",),
    ),
    Exercise(
        "19.2",
        "19_2_shards.cu",
        ("split columns at whole quantization groups", "按完整的分组切分各列"),
    ),
)


def exercises_of(name: str) -> tuple[Exercise, ...]:
    """The exercises of a chapter, named "4" or "04", or the one named "4.1" or "04.1".

    Raises:
        UsageError: there is none.
    """
    chapter, dot, number = name.partition(".")
    wanted = chapter.zfill(2) + dot + number
    found = tuple(each for each in EXERCISES if wanted in (each.chapter, each.name))
    if not found:
        chapters = ", ".join(dict.fromkeys(each.chapter for each in EXERCISES))
        if not dot and wanted.isdigit():
            raise UsageError(f"chapter {wanted}: has no exercise that is checked: chapters {chapters} have some")
        raise UsageError(f"{name}: there is no such exercise: `warpbus learn` lists them")
    return found
