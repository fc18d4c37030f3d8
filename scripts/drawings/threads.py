"""Drawings of threads and of how they reach memory."""

from drawings.svg import Drawing, Say


def grid_block_thread(say: Say) -> Drawing:
    title = say(
        "A grid of blocks, a block of threads, and the index of one thread",
        "网格由线程块构成，线程块由线程构成，以及一个线程的下标",
    )
    d = Drawing(760, 300, title)
    # Below the cells that are drawn later: they cross no text.
    d.line((260, 92), (420, 40), dashed=True)
    d.line((260, 144), (420, 196), dashed=True)
    d.text(20, 28, say("grid: 4 x 3 blocks (gridDim)", "网格：4 × 3 个线程块（gridDim）"), 14, bold=True)
    d.grid(
        20,
        40,
        3,
        4,
        80,
        lambda r, c: "orange" if (r, c) == (1, 2) else "grey",
        lambda r, c: f"({c}, {r})",
        height=52,
        size=13,
    )
    d.text(
        420, 28, say("block (2, 1): 8 x 4 threads (blockDim)", "线程块 (2, 1)：8 × 4 个线程（blockDim）"), 14, bold=True
    )
    d.grid(
        420,
        40,
        4,
        8,
        39,
        lambda r, c: "blue" if (r, c) == (2, 3) else "orange",
        lambda r, c: f"{c},{r}",
        height=39,
        size=11,
    )
    d.text(20, 232, "blockIdx = (2, 1), threadIdx = (3, 2)", 14, mono=True)
    d.text(20, 258, "column = blockIdx.x * blockDim.x + threadIdx.x = 2 * 8 + 3 = 19", 14, mono=True)
    d.text(20, 284, "row    = blockIdx.y * blockDim.y + threadIdx.y = 1 * 4 + 2 = 6", 14, mono=True)
    return d


def coalescing(say: Say) -> Drawing:
    title = say(
        "16 threads that read neighbours need 2 sectors of 32 bytes; with a stride of 4 they need 8",
        "16 个线程读相邻元素只需 2 个 32 字节的扇区；步长为 4 则需 8 个",
    )
    d = Drawing(760, 330, title)

    def warp(y: float, heading: str, address: list[int], note: str) -> None:
        d.text(20, y, heading, 14, bold=True)
        d.grid(20, y + 10, 1, 16, 45, "orange", lambda r, c: f"T{c}", height=22)
        touched = {word // 8 for word in address}
        d.grid(20, y + 82, 1, 64, 11.25, lambda r, c: "blue" if c // 8 in touched else "grey", height=22)
        for thread, word in enumerate(address):
            d.line((42 + thread * 45, y + 32), (25.6 + word * 11.25, y + 82))
        for sector in range(8):
            d.box(20 + sector * 90, y + 82, 90, 22, "none", strong=True, radius=0)
        d.text(20, y + 124, note, 12, soft=True)

    warp(
        30,
        say("neighbours: x[threadIdx.x]", "相邻：x[threadIdx.x]"),
        list(range(16)),
        say(
            "16 threads of a warp: 2 sectors of 32 bytes, every byte is used",
            "线程束中的 16 个线程：2 个 32 字节扇区，每个字节都有用",
        ),
    )
    warp(
        190,
        say("stride 4: x[4 * threadIdx.x]", "步长 4：x[4 * threadIdx.x]"),
        [4 * i for i in range(16)],
        say(
            "8 sectors for the same 16 numbers: a quarter of the bytes is used",
            "同样 16 个数要 8 个扇区：只用到四分之一的字节",
        ),
    )
    return d


def bank_conflicts(say: Say) -> Drawing:
    title = say(
        "A column of a tile: all words in one bank with 32 words per row, in 32 banks with 33",
        "读一列：每行 32 个字时全在同一个 bank，每行 33 个字时分散到 32 个 bank",
    )
    d = Drawing(760, 270, title)
    for side, words, heading in (
        (20, 32, say("rows of 32 words: 32-way conflict", "每行 32 个字：32 路冲突")),
        (400, 33, say("rows of 33 words: no conflict", "每行 33 个字：无冲突")),
    ):
        d.text(side, 28, heading, 14, bold=True)
        for bank in range(8):
            d.text(side + 50 + bank * 38, 52, f"{bank}", 12, anchor="middle", soft=True)
        d.text(side, 52, say("bank", "bank"), 12, soft=True)
        for row in range(6):

            def fill(_: int, column: int, row: int = row, words: int = words) -> str:
                return "orange" if column == row * words % 32 else "grey"

            def label(_: int, column: int, row: int = row, words: int = words) -> str:
                return f"[{row}][0]" if column == row * words % 32 else ""

            d.text(side, 78 + row * 26, f"{row}", 12, soft=True)
            d.grid(side + 31, 60 + row * 26, 1, 8, 38, fill, label, height=26, size=11)
    d.text(
        20,
        244,
        say(
            "8 of 32 banks shown. Threads 0 to 5 read [0][0] to [5][0]:",
            "图中画出 32 个 bank 中的 8 个。线程 0 到 5 读 [0][0] 到 [5][0]：",
        ),
        12,
        soft=True,
    )
    d.text(
        20,
        261,
        say("left one after the other, right at the same time", "左边只能一个接一个，右边同时完成"),
        12,
        soft=True,
    )
    return d


def reduction_tree(say: Say) -> Drawing:
    title = say("A sum of eight numbers by a tree: three steps instead of seven", "八个数的树形求和：三步，而不是七步")
    d = Drawing(760, 230, title)
    values = [3, 1, 7, 0, 4, 1, 6, 3]
    for level, step in enumerate((4, 2, 1, 0)):
        y = 22 + level * 52
        active = 8 >> level
        for i, value in enumerate(values):
            d.box(40 + i * 62, y, 50, 26, "orange" if i < active else "grey", label=str(value), size=14)
        if step:
            for i in range(step):
                d.arrow(65 + (i + step) * 62, y + 26, 69 + i * 62, y + 51)
                d.arrow(65 + i * 62, y + 26, 65 + i * 62, y + 51)
            d.text(560, y + 44, f"x[i] += x[i + {step}],  i < {step}", 13, mono=True)
            values = [value + values[i + step] if i < step else value for i, value in enumerate(values)]
    d.text(560, 22 + 3 * 52 + 18, say("the sum: x[0]", "总和：x[0]"), 13)
    return d
