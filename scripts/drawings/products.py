"""Drawings of matrix products: tiles, fragments of tensor cores, pipelines."""

from drawings.svg import Drawing, Say

_QUADS = ("orange", "blue", "green", "pink")


def tiles(say: Say) -> Drawing:
    title = say(
        "A block computes one tile of the result from a row of tiles of A and a column of tiles of B",
        "一个线程块用 A 的一行分块和 B 的一列分块算出结果的一个分块",
    )
    d = Drawing(620, 430, title)
    d.text(420, 24, "B  (k x n)", 14, anchor="middle", bold=True)
    d.grid(300, 34, 4, 6, 40, lambda r, c: "blue" if c == 3 else "grey", lambda r, c: f"{r}" if c == 3 else "", size=13)
    d.text(120, 222, "A  (m x k)", 14, anchor="middle", bold=True)
    d.grid(
        40, 232, 4, 4, 40, lambda r, c: "orange" if r == 1 else "grey", lambda r, c: f"{c}" if r == 1 else "", size=13
    )
    d.text(300, 222, "C = A B", 14, bold=True)
    d.grid(300, 232, 4, 6, 40, lambda r, c: "green" if (r, c) == (1, 3) else "grey")
    d.arrow(206, 292, 412, 292)
    d.arrow(440, 198, 440, 266)
    d.text(
        20,
        418,
        say(
            "step i: load tile i of A and tile i of B into shared memory, multiply, add",
            "第 i 步：把 A、B 的第 i 个分块读入共享内存，相乘，累加",
        ),
        13,
        soft=True,
    )
    return d


def mma_fragments(say: Say) -> Drawing:
    title = say(
        "mma.m16n8k16: which lane holds which elements of A, B and C",
        "mma.m16n8k16：A、B、C 的元素分别在哪个 lane 手里",
    )
    d = Drawing(780, 470, title)

    def lane(row: int, pair: int) -> int:
        return row % 8 * 4 + pair % 4

    d.text(20, 26, say("A: 16 x 16, a cell = 2 columns", "A：16 × 16，一格 = 2 列"), 14, bold=True)
    d.grid(20, 38, 16, 8, 36, lambda r, c: _QUADS[c % 4], lambda r, c: f"T{lane(r, c)}", height=22, size=11)
    for row, pair, name in ((0, 0, "a0"), (8, 0, "a1"), (0, 4, "a2"), (8, 4, "a3")):
        d.box(20 + pair * 36, 38 + row * 22, 144, 176, "none", strong=True, radius=0)
        d.text(
            20 + pair * 36 + (150 if pair else -4),
            38 + row * 22 + 92,
            name,
            12,
            anchor="start" if pair else "end",
            mono=True,
        )
    d.text(350, 26, say("B: 16 x 8, a cell = 2 rows", "B：16 × 8，一格 = 2 行"), 14, bold=True)
    d.grid(370, 38, 8, 8, 26, lambda r, c: _QUADS[r % 4], lambda r, c: f"T{c * 4 + r % 4}", height=44, size=10)
    for half, name in ((0, "b0"), (1, "b1")):
        d.box(370, 38 + half * 176, 208, 176, "none", strong=True, radius=0)
        d.text(366, 38 + half * 176 + 92, name, 12, anchor="end", mono=True)
    d.text(604, 26, say("C: 16 x 8, float32", "C：16 × 8，float32"), 14, bold=True)
    d.grid(620, 38, 16, 4, 36, lambda r, c: _QUADS[c % 4], lambda r, c: f"T{lane(r, c)}", height=22, size=11)
    for half, name in ((0, "c0 c1"), (1, "c2 c3")):
        d.box(620, 38 + half * 176, 144, 176, "none", strong=True, radius=0)
        d.text(616, 38 + half * 176 + (82 if half == 0 else 92), name[:2], 12, anchor="end", mono=True)
        d.text(616, 38 + half * 176 + (98 if half == 0 else 108), name[3:], 12, anchor="end", mono=True)
    d.text(
        20,
        422,
        say(
            "T5 holds two neighbours in each register: of A rows 1 and 9, columns 2, 3 and 10, 11;",
            "T5 的每个寄存器放两个相邻元素：A 的第 1、9 行，第 2、3 和 10、11 列；",
        ),
        13,
        soft=True,
    )
    d.text(
        20,
        444,
        say(
            "of B column 1, rows 2, 3 and 10, 11; of C rows 1 and 9, columns 2 and 3, one per register",
            "B 的第 1 列，第 2、3 和 10、11 行；C 的第 1、9 行，第 2、3 列，每个寄存器一个",
        ),
        13,
        soft=True,
    )
    return d


def wgmma(say: Say) -> Drawing:
    title = say(
        "wgmma: four warps multiply tiles in shared memory, each warp holds 16 of 64 rows of the result",
        "wgmma：四个线程束直接乘共享内存里的分块，各持有结果 64 行中的 16 行",
    )
    d = Drawing(790, 360, title)
    d.text(20, 26, say("A: 64 x 16, shared memory", "A：64 × 16，共享内存"), 14, bold=True)
    d.box(60, 130, 80, 180, "yellow", label="64 x 16", size=14)
    d.text(260, 26, say("B: 16 x n, shared memory, n = 8 to 256", "B：16 × n，共享内存，n = 8 到 256"), 14, bold=True)
    d.box(200, 38, 320, 64, "yellow", label="16 x n", size=14)
    for warp in range(4):
        d.box(
            200,
            130 + warp * 45,
            320,
            45,
            _QUADS[warp],
            label=say(
                f"warp {warp}: rows {16 * warp} to {16 * warp + 15}",
                f"线程束 {warp}：第 {16 * warp} 到 {16 * warp + 15} 行",
            ),
        )
    d.text(
        200,
        330,
        say("D: 64 x n float32, in the registers of 128 threads", "D：64 × n 个 float32，在 128 个线程的寄存器里"),
        13,
        soft=True,
    )
    d.arrow(144, 220, 196, 220)
    d.arrow(360, 104, 360, 127)
    d.text(548, 142, say("rows 16 and 24, columns 0 to 7:", "第 16、24 行，第 0 到 7 列："), 12, soft=True)
    d.grid(548, 152, 1, 4, 44, "blue", lambda r, c: f"T{32 + c}", height=26, size=12)
    d.grid(548, 184, 1, 4, 44, "blue", lambda r, c: f"T{32 + c}", height=26, size=12)
    d.text(548, 228, say("a cell = 2 columns, as in C of mma;", "一格 = 2 列，与 mma 的 C 相同；"), 12, soft=True)
    d.text(548, 246, say("repeated every 8 columns", "每 8 列重复一次"), 12, soft=True)
    return d


def pipeline(say: Say) -> Drawing:
    title = say(
        "cp.async with three stages: while tile i is multiplied, tiles i + 1 and i + 2 are under way",
        "cp.async 三级流水：乘第 i 块时，第 i + 1、i + 2 块已在途中",
    )
    d = Drawing(760, 260, title)
    d.text(20, 26, say("no overlap", "不重叠"), 14, bold=True)
    for i in range(4):
        d.box(20 + i * 180, 36, 118, 28, "blue", label=say(f"copy tile {i}", f"取第 {i} 块"))
        d.box(138 + i * 180, 36, 60, 28, "orange", label=say(f"mma {i}", f"乘 {i}"))
    d.text(20, 100, say("three stages", "三级流水"), 14, bold=True)
    for i in range(7):
        # A stage is filled again when its tile has been multiplied.
        start = 110 + i * 8 if i < 3 else 250 + (i - 2) * 62
        if i < 3:
            d.text(20, 128 + i * 30, say(f"stage {i}", f"第 {i} 级"), 12, soft=True)
        d.box(start, 112 + i % 3 * 30, 122, 24, "blue", label=say(f"copy {i}", f"取 {i}"), size=12)
    d.text(20, 224, say("tensor cores", "张量核心"), 12, soft=True)
    for i in range(7):
        d.box(250 + i * 62, 208, 60, 26, "orange", label=say(f"mma {i}", f"乘 {i}"), size=12)
    d.text(740, 252, say("time", "时间"), 12, anchor="end", soft=True)
    return d


def register_tiles(say: Say) -> Drawing:
    title = say(
        "A thread multiplies 8 numbers of A by 8 of B: 64 multiply-adds for 16 loads",
        "一个线程用 A 的 8 个数乘 B 的 8 个数：16 次读取，64 次乘加",
    )
    d = Drawing(620, 330, title)
    d.text(330, 26, say("8 numbers of a row of B", "B 的一行里的 8 个数"), 14, anchor="middle", bold=True)
    d.grid(220, 36, 1, 8, 28, "blue", lambda r, c: f"b{c}", size=12)
    d.text(20, 180, say("8 numbers of", "A 的一列里的"), 14, bold=True)
    d.text(20, 200, say("a column of A", "8 个数"), 14, bold=True)
    d.grid(176, 80, 8, 1, 28, "orange", lambda r, c: f"a{r}", size=12)
    d.grid(220, 80, 8, 8, 28, "green")
    d.text(460, 160, say("64 sums in registers:", "64 个和在寄存器里："), 13)
    d.text(460, 184, "c[i][j] += a[i]*b[j]", 12, mono=True)
    d.text(460, 220, say("per step of k:", "k 每前进一步："), 13)
    d.text(460, 242, say("16 loads, 64 FMA", "读 16 次，乘加 64 次"), 13, bold=True)
    return d


def im2col(say: Say) -> Drawing:
    title = say(
        "im2col: the nine pixels around each pixel become a column, and the convolution a matrix product",
        "im2col：每个像素周围的九个像素排成一列，卷积就成了矩阵乘法",
    )
    d = Drawing(760, 310, title)
    d.text(20, 28, say("image", "图像"), 14, bold=True)
    d.grid(
        *(20, 40, 5, 6, 28),
        lambda r, c: "orange" if 1 <= r <= 3 and 2 <= c <= 4 else "grey",
        lambda r, c: f"{r * 6 + c}",
        size=11,
    )
    seen = (8, 9, 10, 14, 15, 16, 20, 21, 22)
    d.text(430, 28, say("columns: 9 x pixels", "列矩阵：9 × 像素数"), 14, bold=True)
    d.grid(
        *(430, 40, 9, 9, 28),
        lambda r, c: "orange" if c == 5 else "grey",
        lambda r, c: str(seen[r]) if c == 5 else "...",
        height=22,
        size=11,
    )
    d.arrow(192, 110, 422, 110)
    d.text(306, 102, say("around pixel 15", "像素 15 周围"), 12, anchor="middle", soft=True)
    d.text(20, 212, say("filters: filters x 9", "卷积核：核数 × 9"), 14, bold=True)
    d.grid(20, 222, 2, 9, 28, "blue", height=22)
    d.text(286, 248, "x", 16, anchor="middle", bold=True)
    d.text(302, 247, say("columns = output", "列矩阵 = 输出"), 12)
    d.text(
        430,
        256,
        say("column 15: what the filters multiply for pixel 15", "第 15 列：算像素 15 时卷积核乘的数"),
        12,
        soft=True,
    )
    d.text(20, 296, say("with c channels the columns have 9 c rows", "有 c 个通道时，列矩阵有 9c 行"), 12, soft=True)
    return d


def layer(say: Say) -> Drawing:
    title = say(
        "A layer: each output is the sigmoid of a weighted sum of all inputs",
        "一层网络：每个输出是全部输入的加权和经过 sigmoid",
    )
    d = Drawing(800, 330, title)
    inputs = [(90.0, 70.0 + 62 * i) for i in range(4)]
    outputs = [(330.0, 101.0 + 62 * i) for i in range(3)]
    for source in inputs:
        for target in outputs:
            d.line((source[0] + 19, source[1]), (target[0] - 24, target[1]), strong=target == outputs[1])
    for i, (x, y) in enumerate(inputs):
        d.dot(x, y, 19, "orange")
        d.text(x, y + 5, f"x{i}", 14, anchor="middle")
    for i, (x, y) in enumerate(outputs):
        d.dot(x, y, 24, "green")
        d.text(x, y + 5, f"y{i}", 14, anchor="middle")
    d.text(90, 34, say("inputs x", "输入 x"), 14, anchor="middle", bold=True)
    d.text(330, 34, say("outputs y", "输出 y"), 14, anchor="middle", bold=True)
    d.text(210, 318, say("one weight per line", "每条线一个权重"), 13, anchor="middle", soft=True)
    d.text(440, 34, say("the same as a product: y = σ(W x + b)", "写成乘积：y = σ(W x + b)"), 14, bold=True)
    d.grid(440, 70, 3, 4, 38, lambda r, c: "blue" if r == 1 else "grey", lambda r, c: f"w{r}{c}", size=12)
    d.grid(616, 51, 4, 1, 38, "orange", lambda r, c: f"x{r}", size=12)
    d.text(667, 133, "+", 16, anchor="middle")
    d.grid(682, 70, 3, 1, 38, lambda r, c: "yellow" if r == 1 else "grey", lambda r, c: f"b{r}", size=12)
    d.text(440, 234, "y1 = σ(w10 x0 + w11 x1 + w12 x2 + w13 x3 + b1)", 12, mono=True)
    d.text(440, 262, "σ(s) = 1 / (1 + exp(-s))", 12, mono=True)
    d.text(440, 290, say("one row of W per output: a dot product", "W 的每一行对应一个输出：一次点积"), 13, soft=True)
    return d
