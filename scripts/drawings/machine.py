"""Drawings of the machines: chips, memories, latency and throughput, the roofline, streams."""

import math

from drawings.svg import Drawing, Say


def cpu_gpu(say: Say) -> Drawing:
    title = say(
        "Chip areas: a CPU spends most on control and caches, a GPU most on arithmetic units",
        "芯片面积：CPU 大半用于控制和缓存，GPU 大半用于运算单元",
    )
    d = Drawing(760, 330, title)
    d.text(190, 28, "CPU", 17, anchor="middle", bold=True)
    d.text(570, 28, "GPU", 17, anchor="middle", bold=True)
    for core in range(4):
        x, y = 30 + core % 2 * 162, 42 + core // 2 * 84
        d.box(x, y, 156, 78, "grey")
        d.box(x + 6, y + 6, 70, 42, "yellow", label=say("control", "控制"), size=12)
        d.grid(x + 82, y + 6, 2, 2, 34, "orange", lambda r, c: "ALU", height=21)
        d.box(x + 6, y + 53, 144, 19, "blue", label=say("L1 and L2 cache", "L1、L2 缓存"), size=12)
    d.box(30, 212, 318, 42, "blue", label=say("L3 cache, tens of MB", "L3 缓存，几十 MB"))
    d.box(30, 264, 318, 28, "green", label=say("main memory", "主存"))
    for sm in range(12):
        y = 42 + sm * 14.1
        d.box(402, y, 24, 6, "yellow", radius=1)
        d.box(402, y + 6, 24, 6, "blue", radius=1)
        d.grid(429, y, 1, 28, 10.6, "orange", height=12)
    d.box(402, 212, 324, 42, "blue", label=say("L2 cache, 50 MB (H100)", "L2 缓存，50 MB（H100）"))
    d.box(402, 264, 324, 28, "green", label=say("device memory, 3 TB/s (H100)", "显存，3 TB/s（H100）"))
    d.text(30, 315, say("few threads, each as fast as possible", "线程少，每个尽可能快"), soft=True)
    d.text(402, 315, say("very many threads, each slow, together fast", "线程极多，单个慢，合起来快"), soft=True)
    return d


def latency_throughput(say: Say) -> Drawing:
    title = say(
        "Waiting for memory: one thread stands still, a multiprocessor goes on with another warp",
        "等待内存：单个线程只能停下，多处理器则换一个线程束继续",
    )
    d = Drawing(760, 250, title)
    d.text(20, 30, say("one thread of a CPU without a cache hit", "CPU 的一个线程，缓存未命中"), 14, bold=True)
    for i in range(3):
        d.box(20 + i * 240, 42, 40, 26, "orange")
        d.box(60 + i * 240, 42, 200, 26, "none", label=say("waits for memory", "等待内存"), dashed=True, size=12)
    d.text(20, 102, say("one multiprocessor of a GPU, six warps", "GPU 的一个多处理器，六个线程束"), 14, bold=True)
    for warp in range(6):
        y = 114 + warp * 18
        d.text(20, y + 12, say(f"warp {warp}", f"线程束 {warp}"), 11, soft=True)
        for i in range(3):
            x = 84 + warp * 36 + i * 216
            if x + 36 <= 748:
                d.box(x, y, 36, 14, "orange", radius=1)
            end = min(x + 216, 748)
            if end > x + 36:
                d.box(x + 36, y, end - x - 36, 14, "none", dashed=True, radius=1)
    d.text(
        20,
        240,
        say("orange: computes; the GPU's units are never idle", "橙色：在计算；GPU 的运算单元一刻不闲"),
        12,
        soft=True,
    )
    return d


def memory_hierarchy(say: Say) -> Drawing:
    title = say(
        "The memories of a GPU, from registers to the host's memory: size and speed",
        "GPU 的存储层次，从寄存器到主机内存：容量与速度",
    )
    d = Drawing(760, 330, title)
    rows = [
        (say("registers", "寄存器"), say("of one thread", "属于一个线程"), "64 K x 32 bit / SM", "orange", 250),
        (say("shared memory, L1", "共享内存、L1"), say("of one block", "属于一个线程块"), "256 KB / SM", "yellow", 320),
        (say("L2 cache", "L2 缓存"), say("of all blocks", "所有线程块共用"), "50 MB", "blue", 390),
        (
            say("device memory", "显存（全局内存）"),
            say("of all kernels", "所有核函数共用"),
            "80 GB, 3 TB/s",
            "green",
            460,
        ),
        (
            say("host memory", "主机内存"),
            say("over PCIe 5.0", "经 PCIe 5.0"),
            say("a TB, 50 GB/s", "TB 级，50 GB/s"),
            "grey",
            530,
        ),
    ]
    for i, (name, scope, size, fill, width) in enumerate(rows):
        y = 20 + i * 56
        d.box(290 - width / 2, y, width, 44, fill, label=name, size=15)
        d.text(572, y + 18, size, 14, bold=True)
        d.text(572, y + 36, scope, 12, soft=True)
        if i:
            d.arrow(290, y - 1, 290, y - 11)
    d.text(
        20, 318, say("H100; upwards: smaller, nearer, faster", "以 H100 为例；越往上越小、越近、越快"), 12, soft=True
    )
    return d


def streams(say: Say) -> Drawing:
    title = say(
        "One stream does copies and kernels in turn; three streams overlap them",
        "一个流依次拷贝和计算；三个流让它们重叠",
    )
    d = Drawing(760, 250, title)
    steps = (("blue", say("copy in", "拷入")), ("orange", say("kernel", "计算")), ("green", say("copy out", "拷出")))
    d.text(20, 28, say("one stream", "一个流"), 14, bold=True)
    for i in range(9):
        fill, label = steps[i % 3]
        d.box(20 + i * 80, 38, 78, 30, fill, label=f"{label} {i // 3}", size=12)
    d.text(20, 108, say("three streams, pinned host memory", "三个流，锁页主机内存"), 14, bold=True)
    for stream in range(3):
        y = 120 + stream * 38
        d.text(20, y + 20, say(f"stream {stream}", f"流 {stream}"), 12, soft=True)
        for i, (fill, label) in enumerate(steps):
            d.box(90 + (i + stream) * 80, y, 78, 30, fill, label=f"{label} {stream}", size=12)
    d.line((490, 114), (490, 228), dashed=True)
    d.text(500, 176, say("5 steps instead of 9", "5 步，而不是 9 步"), 12, soft=True)
    d.text(740, 244, say("time", "时间"), 12, anchor="end", soft=True)
    return d


def roofline(say: Say) -> Drawing:
    title = say(
        "Roofline of an H100: 3.01 TB/s up to 233 operations per byte, then 700 TFLOP/s",
        "H100 的屋顶线：每字节 233 次运算以内由 3.01 TB/s 决定，以上由 700 TFLOP/s 决定",
    )
    d = Drawing(760, 360, title)

    def at(intensity: float, flops: float) -> tuple[float, float]:
        return 80 + math.log10(intensity / 0.05) * 150, 310 - math.log10(flops / 0.1) * 67

    for exponent in range(-1, 4):
        x, _ = at(10.0**exponent, 1)
        d.line((x, 310), (x, 316))
        d.text(x, 332, f"{10.0**exponent:g}", 12, anchor="middle")
    for exponent in range(-1, 4):
        _, y = at(1, 10.0**exponent)
        d.line((74, y), (80, y))
        d.text(70, y + 4, f"{10.0**exponent:g}", 12, anchor="end")
    d.line((80, 40), (80, 310), (740, 310))
    d.line(at(0.05, 0.05 * 3.01), at(700 / 3.01, 700), at(1200, 700), strong=True)
    d.text(16, 28, "TFLOP/s", 12, soft=True)
    d.text(
        740, 350, say("operations per byte of device memory", "每字节显存流量的运算次数"), 12, anchor="end", soft=True
    )
    d.text(*_off(at(0.8, 2.4), -14, -10), say("3.01 TB/s", "3.01 TB/s"), 13, anchor="end", bold=True)
    d.text(*_off(at(500, 700), 0, -10), "700 TFLOP/s", 13, anchor="middle", bold=True)
    for name, intensity, flops, fill in (
        (say("vector addition", "向量加法"), 1 / 12, 0.251, "blue"),
        (say("GEMV, 16 bits", "GEMV，16 比特"), 1, 2.66, "green"),
        (say("GEMV, 4 bits", "GEMV，4 比特"), 3.88, 11.1, "pink"),
        (say("matmul 4096: tiled", "4096 阶矩阵乘法：分块"), 1365, 6.36, "yellow"),
        (say("matmul 4096: wgmma", "4096 阶矩阵乘法：wgmma"), 1365, 698, "orange"),
    ):
        x, y = at(min(intensity, 1100), flops)
        d.dot(x, y, 6, fill)
        right = intensity < 100
        d.text(x + (12 if right else -12), y + (40 if flops > 600 else 5), name, 12, anchor="start" if right else "end")
    return d


def _off(point: tuple[float, float], x: float, y: float) -> tuple[float, float]:
    return point[0] + x, point[1] + y


def virtual_memory(say: Say) -> Drawing:
    title = say(
        "Growing without copying: addresses are reserved once, and pieces of memory are mapped behind them",
        "增长而不拷贝：地址一次预留，显存一段一段映射到地址后面",
    )
    d = Drawing(760, 280, title)
    d.text(20, 28, "cudaMalloc + cudaMemcpy", 14, bold=True)
    d.box(20, 40, 140, 30, "blue", label=say("old, full", "旧的，已满"), size=12)
    d.box(300, 40, 280, 30, "green", label=say("new, twice as large", "新的，两倍大"), size=12)
    d.arrow(164, 55, 296, 55)
    d.text(230, 48, say("copy", "拷贝"), 12, anchor="middle")
    d.text(596, 52, say("new address, both", "地址变了，拷贝时"), 12, soft=True)
    d.text(596, 68, say("exist while copying", "两份同时存在"), 12, soft=True)
    d.text(20, 112, "cuMemAddressReserve + cuMemMap", 14, bold=True)
    d.text(20, 142, say("addresses", "地址"), 12, soft=True)
    for piece in range(6):
        d.box(120 + piece * 100, 124, 100, 28, "yellow" if piece < 3 else "none", dashed=piece >= 3, radius=0)
    d.text(20, 222, say("memory", "显存"), 12, soft=True)
    for piece, at in enumerate((2, 0, 4)):
        fill = "green" if piece == 2 else "blue"
        d.box(120 + at * 100, 204, 96, 28, fill, label=say(f"piece {piece}", f"第 {piece} 段"), size=12)
        d.arrow(170 + piece * 100, 154, 168 + at * 100, 202)
    d.text(
        20,
        264,
        say(
            "piece 2 is new: the first two stay where they are, at the same addresses",
            "第 2 段是新加的：前两段原地不动，地址也不变",
        ),
        12,
        soft=True,
    )
    return d
