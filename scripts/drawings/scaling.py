"""Drawings of work that is spread over streams and GPUs, and of where the memory of a small card goes."""

from drawings.svg import Drawing, Say

_FILLS = ("orange", "blue", "green", "pink")


def graph_launch(say: Say) -> Drawing:
    title = say(
        "Small kernels wait for their launches; a CUDA graph launches all of them at once",
        "小核函数要等一次次启动；CUDA Graph 一次启动全部",
    )
    d = Drawing(760, 250, title)
    for y, name in ((40, say("one launch per kernel", "逐个启动")), (150, say("one graph", "一个图"))):
        d.text(20, y - 12, name, 14, bold=True)
        d.text(20, y + 20, say("host", "主机"), 12, soft=True)
        d.text(20, y + 58, "GPU", 12, soft=True)
    for i in range(6):
        d.box(80 + i * 100, 42, 92, 28, "grey", label=say("launch", "启动"), size=12)
        d.box(160 + i * 100, 80, 30, 28, "orange", radius=1)
        if i < 5:
            d.box(190 + i * 100, 80, 70, 28, "none", dashed=True, label=say("idle", "空闲"), size=11)
    d.box(80, 152, 120, 28, "grey", label=say("launch", "启动"), size=12)
    for i in range(6):
        d.box(190 + i * 34, 190, 30, 28, "orange", radius=1)
    d.text(410, 209, say("the same six kernels", "同样的六个核函数"), 12, soft=True)
    d.text(740, 242, say("time", "时间"), 12, anchor="end", soft=True)
    return d


def card_memory(say: Say) -> Drawing:
    title = say(
        "ChatGLM-6B in 6 GB and GLM-4.7-Flash in 24 GB: what each part of the plan takes",
        "6 GB 里的 ChatGLM-6B 和 24 GB 里的 GLM-4.7-Flash：计划里各部分占多少",
    )
    d = Drawing(760, 316, title)
    parts = {
        "weights": (say("matrices", "矩阵"), "orange"),
        "embedding": (say("embedding, head", "词嵌入、输出头"), "yellow"),
        "cache": (say("KV cache", "KV 缓存"), "green"),
        "workspace": (say("workspace", "工作区"), "blue"),
        "rest": (say("CUDA context, granularity", "CUDA 上下文、分配粒度"), "pink"),
    }
    bars = (
        (
            "ChatGLM-6B, w4a16-g128, 6 GB",
            6.0,
            {"weights": 2.91, "embedding": 1.07, "cache": 0.49, "workspace": 0.44, "rest": 0.88},
        ),
        (
            "GLM-4.7-Flash, w4a16-g128, 24 GB",
            24.0,
            {"weights": 15.45, "embedding": 1.26, "cache": 3.8, "workspace": 2.05, "rest": 1.42},
        ),
    )
    for i, (name, most, sizes) in enumerate(bars):
        y = 46 + i * 98
        d.text(20, y - 12, name, 14, bold=True)
        x = 20.0
        for part, size in sizes.items():
            width = size / most * 720
            d.box(x, y, width, 44, parts[part][1], label=f"{size:.2f}", size=13, radius=0)
            x += width
        d.box(20, y, 720, 44, "none", strong=True, radius=0)
    for i, (name, fill) in enumerate(parts.values()):
        x, y = 20 + i % 3 * 250, 240 + i // 3 * 28
        d.box(x, y, 18, 18, fill)
        d.text(x + 28, y + 14, name, 13)
    d.text(740, 304, "GB", 12, anchor="end", soft=True)
    return d


def ring_all_reduce(say: Say) -> Drawing:
    title = say(
        "A ring sends one piece per step to the neighbour; one shot reads all parts at once",
        "环形：每步把一段传给邻居；一步完成：同时读取所有部分",
    )
    d = Drawing(760, 330, title)
    d.text(20, 28, say("ring: 3 steps add, 3 steps copy", "环形：3 步相加，3 步拷贝"), 14, bold=True)
    places = ((40, 60), (270, 60), (270, 220), (40, 220))
    for rank, (x, y) in enumerate(places):
        d.box(x, y, 110, 62, "grey")
        d.text(x + 10, y + 20, f"GPU {rank}", 13, bold=True)
        for piece in range(4):
            strong = piece == rank
            d.box(x + 8 + piece * 24, y + 30, 22, 22, _FILLS[piece], label=str(piece), size=11, strong=strong, radius=0)
    d.arrow(150, 91, 268, 91)
    d.arrow(325, 122, 325, 218)
    d.arrow(270, 251, 152, 251)
    d.arrow(95, 220, 95, 124)
    for x, y, piece, anchor in (
        (209, 84, 0, "middle"),
        (334, 174, 1, "start"),
        (209, 270, 2, "middle"),
        (86, 174, 3, "end"),
    ):
        d.text(x, y, say(f"piece {piece}", f"第 {piece} 段"), 12, anchor=anchor, soft=True)
    d.text(460, 28, say("one shot", "一步完成"), 14, bold=True)
    for rank in range(4):
        y = 48 + rank * 62
        d.box(460, y, 90, 44, _FILLS[rank], label=f"GPU {rank}", size=13)
        d.line((550, y + 22), (630, 146), arrow=True)
    d.box(632, 116, 110, 60, "grey", label=say("sum on GPU 0,\nin rank order", "GPU 0 上的和，\n按 rank 次序"), size=12)
    d.text(460, 316, say("all GPUs do this at the same time", "所有 GPU 同时这样做"), 12, soft=True)
    d.text(20, 316, say("the first step; the bold piece is sent", "第一步；发送粗框的那段"), 12, soft=True)
    return d


def column_row_split(say: Say) -> Drawing:
    title = say(
        "An MLP on two GPUs: the first matrix by rows, the second by columns, one sum at the end",
        "两块 GPU 上的 MLP：第一个矩阵按行切，第二个按列切，最后求一次和",
    )
    d = Drawing(760, 330, title)
    d.text(90, 28, "gate_up", 14, anchor="middle", bold=True)
    d.box(50, 50, 80, 118, "orange", label=say("54 x 128\nrows", "54 x 128\n行"), size=12, radius=0)
    d.box(50, 168, 80, 114, "blue", label=say("53 x 128\nrows", "53 x 128\n行"), size=12, radius=0)
    d.text(22, 170, "x", 15, bold=True)
    d.arrow(32, 165, 48, 165)
    for y, fill, gpu in ((96, "orange", 0), (212, "blue", 1)):
        d.arrow(130, y + 14, 172, y + 14)
        d.box(174, y - 20, 100, 68, fill, label=say("activation\nof its rows", "这些行的\n激活"), size=12)
        d.text(224, y - 28, f"GPU {gpu}", 12, anchor="middle", soft=True)
        d.line(
            (274, y + 14), (320, y + 14), (320, 110 if gpu == 0 else 226), (338, 110 if gpu == 0 else 226), arrow=True
        )
    d.text(440, 28, "down", 14, anchor="middle", bold=True)
    d.box(340, 74, 102, 76, "orange", label=say("54 groups\nof columns", "54 组\n列"), size=12, radius=0)
    d.box(442, 74, 100, 76, "grey", dashed=True, radius=0)
    d.box(340, 190, 102, 76, "grey", dashed=True, radius=0)
    d.box(442, 190, 100, 76, "blue", label=say("53 groups\nof columns", "53 组\n列"), size=12, radius=0)
    d.arrow(542, 112, 630, 158)
    d.arrow(542, 228, 630, 182)
    d.box(632, 142, 106, 56, "green", label=say("all-reduce:\nsum", "all-reduce：\n求和"), size=12)
    d.text(
        50,
        316,
        say("13,696 = 107 x 128: whole quantization groups per GPU", "13,696 = 107 x 128：每块 GPU 都是完整的分组"),
        12,
        soft=True,
    )
    return d
