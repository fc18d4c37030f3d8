"""Drawings of what language models need: quantization, the KV cache, moving a GPU."""

from drawings.svg import Drawing, Say


def gptq_sweep(say: Say) -> Drawing:
    title = say(
        "GPTQ rounds a column and spreads its error over the columns that are not rounded yet",
        "GPTQ 每次取整一列，并把误差分摊给尚未取整的各列",
    )
    d = Drawing(760, 270, title)
    d.text(20, 28, say("weights W (rows: outputs, columns: inputs)", "权重 W（行：输出，列：输入）"), 14, bold=True)

    def fill(_: int, column: int) -> str:
        return "green" if column < 4 else "orange" if column == 4 else "blue"

    d.grid(20, 62, 5, 12, 34, fill, height=26)
    d.text(88, 54, say("rounded", "已取整"), 12, anchor="middle", soft=True)
    d.text(173, 54, "j", 13, anchor="middle", bold=True)
    d.text(309, 54, say("still adjusted", "继续调整"), 12, anchor="middle", soft=True)
    d.line((173, 194), (173, 212), (400, 212), arrow=True)
    d.text(
        190,
        230,
        say("error of column j, by row j of the factor of H⁻¹", "第 j 列的误差，按 H⁻¹ 分解因子的第 j 行分摊"),
        12,
        soft=True,
    )
    x = 456
    for i, (number, text) in enumerate(
        (
            ("1", say("q = round(w_j / s)", "q = round(w_j / s)")),
            ("2", say("e = (w_j - s q) / U[j, j]", "e = (w_j - s q) / U[j, j]")),
            ("3", say("W[:, j+1:] -= e U[j, j+1:]", "W[:, j+1:] -= e U[j, j+1:]")),
        )
    ):
        d.box(x, 66 + i * 44, 26, 26, "yellow", label=number, bold=True)
        d.text(x + 38, 84 + i * 44, text, 13, mono=True)
    d.text(x, 214, "UᵀU = H⁻¹,  H = 2 XᵀX", 13, mono=True)
    d.text(20, 258, say("from left to right, once through all columns", "从左到右，把所有列走一遍"), 12, soft=True)
    return d


def paged_cache(say: Say) -> Drawing:
    title = say(
        "Paged KV cache: each sequence has a table of blocks, and two share the block of a common prefix",
        "分页 KV 缓存：每个序列有一张块表，公共前缀的块由两个序列共用",
    )
    d = Drawing(760, 300, title)
    d.text(20, 28, say("block tables", "块表"), 14, bold=True)
    tables = (("A", (3, 0, 5), "orange"), ("B", (3, 6), "blue"), ("C", (1,), "green"))
    for i, (name, blocks, fill) in enumerate(tables):
        y = 44 + i * 84
        d.text(20, y + 22, say(f"sequence {name}", f"序列 {name}"), 13)
        d.grid(110, y, 1, len(blocks), 42, fill, lambda r, c, b=blocks: str(b[c]), height=32, size=14)  # type: ignore[misc]
    d.text(440, 28, say("blocks of the cache", "缓存的块"), 14, bold=True)
    owners = {0: "orange", 5: "orange", 6: "blue", 1: "green", 3: "yellow"}
    used = {0: 8, 5: 3, 6: 5, 1: 6, 3: 8}
    for block in range(8):
        y = 40 + block * 29
        d.text(424, y + 18, str(block), 13, anchor="end", soft=True)
        d.grid(440, y, 1, 8, 24, lambda r, c, b=block: owners[b] if c < used.get(b, 0) else "grey", height=24)  # type: ignore[misc]
        note = {3: say("shared by A and B", "A、B 共用"), 2: say("free", "空闲")}.get(block)
        if note:
            d.text(644, y + 17, note, 11, soft=True)
    for i, (_, blocks, _) in enumerate(tables):
        for c, block in enumerate(blocks):
            d.line((131 + c * 42, 76 + i * 84), (131 + c * 42, 84 + i * 84 + c * 6), (408, 52 + block * 29), arrow=True)
    d.text(20, 290, say("a cell is the keys and values of one token", "一格是一个 token 的键和值"), 12, soft=True)
    return d


def migrating_lease(say: Say) -> Drawing:
    title = say(
        "A lease migrates: the program keeps its handles while another process takes over its tensors",
        "租约迁移：程序手里的句柄不变，张量交给另一个进程",
    )
    d = Drawing(760, 300, title)
    d.box(20, 40, 190, 230, "grey")
    d.text(115, 30, say("program", "程序"), 14, anchor="middle", bold=True)
    d.box(
        36,
        60,
        158,
        60,
        "orange",
        label=say("tensors on warpbus:0\n(handles, no memory)", "warpbus:0 上的张量\n（只有句柄，没有显存）"),
        size=12,
    )
    d.box(36, 140, 158, 60, "yellow", label=say("calls not yet\nacknowledged", "尚未确认的\n调用"), size=12)
    for y, host, label, fill in (
        (40, "mill/0", say("process of\nthe lease", "租约的进程"), "blue"),
        (170, "mill/1", say("new process of\nthe lease", "租约的新进程"), "green"),
    ):
        d.box(420, y, 320, 100, "grey")
        d.text(434, y + 22, f"GPU {host}", 14, bold=True)
        d.box(434, y + 34, 142, 52, fill, label=label, size=12)
        d.box(586, y + 34, 142, 52, fill, label=say("storages", "存储"), size=12)
    d.line((210, 90), (420, 90), arrow=True, dashed=True)
    d.line((210, 170), (300, 170), (300, 220), (420, 220), arrow=True)
    d.arrow(657, 128, 657, 202)
    d.text(222, 82, say("before", "迁移前"), 12, soft=True)
    d.text(312, 212, say("after", "迁移后"), 12, soft=True)
    d.text(560, 160, say("2 copy", "2 拷贝"), 12)
    d.text(222, 108, say("1 pause at a call", "1 在一次调用处暂停"), 12)
    d.text(222, 256, say("3 repeat what was", "3 补发未确认的"), 12)
    d.text(222, 272, say("not acknowledged", "调用"), 12)
    return d
