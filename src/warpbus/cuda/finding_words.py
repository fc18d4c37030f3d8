"""The sentences of findings: by their kinds, in the languages of `findings.LANGUAGES`."""

WORDS: dict[str, tuple[str, str]] = {
    "at": ("kernel {kernel}, block {block}, thread {thread}", "核函数 {kernel}，线程块 {block}，线程 {thread}"),
    "block": ("kernel {kernel}, block {block}", "核函数 {kernel}，线程块 {block}"),
    "line": (" (line {line})", "（第 {line} 行）"),
    "reads": ("reads", "读"),
    "writes": ("writes", "写"),
    "accesses": ("accesses", "访问"),
    "device": ("device", "设备"),
    "shared": ("shared", "共享"),
    "outside": (
        "{at}: {verb} {array}[{index}]{line}, but {array} has {elements}: {hint}",
        "{at}：{verb}了 {array}[{index}]{line}，但 {array} 只有 {count} 个元素（每个 {element} 字节）：{hint}",
    ),
    "one_past": (
        "the last valid index is {last}. Is a bounds check such as `if (i < n)` missing, does it compare with <= "
        "instead of <, or is the index one too large?",
        "最后一个有效下标是 {last}。是否缺少 `if (i < n)` 这样的边界检查，或者把 < 写成了 <=，或者下标多了 1？",
    ),
    "far": (
        "the last valid index is {last}. Check the index before the access, for example with `if (i < n)`",
        "最后一个有效下标是 {last}。请在访问之前检查下标，例如 `if (i < n)`",
    ),
    "before": (
        "{at}: {verb} {array}[{index}]{line}, which is before the begin of {array}",
        "{at}：{verb}了 {array}[{index}]{line}，它在 {array} 的起点之前",
    ),
    "padding": (
        "kernel {kernel} wrote {array}[{index}], but {array} has {elements}: {hint}",
        "核函数 {kernel} 写了 {array}[{index}]，但 {array} 只有 {count} 个元素（每个 {element} 字节）：{hint}",
    ),
    "padding_before": (
        "kernel {kernel} wrote {array}[{index}], which is before the begin of {array}",
        "核函数 {kernel} 写了 {array}[{index}]，它在 {array} 的起点之前",
    ),
    "misaligned": (
        "{at}: {verb} {bytes} bytes at {array}[{index}]{line}, but its address is not a multiple of "
        "{bytes}: a GPU stops "
        "with `misaligned address`",
        "{at}：在 {array}[{index}] 处{verb} {bytes} 字节{line}，但该地址不是 {bytes} 的倍数：GPU 会报 "
        "misaligned address",
    ),
    "host": (
        "host code accesses device memory ({array}, {bytes} bytes){line}: copy it with cudaMemcpy first",
        "主机代码访问了设备内存（{array}，{bytes} 字节）{line}：请先用 cudaMemcpy 复制",
    ),
    "wild": (
        "{at}: access to address {address}{line}, which no cudaMalloc returned: a wild index, or a host "
        "pointer that does "
        "not exist",
        "{at}：访问了地址 {address}{line}，它不属于任何 cudaMalloc 分配：下标越界很远，或者用了不存在的主机指针",
    ),
    "wild_host": (
        "host code: access to address {address}{line}, which is not allocated",
        "主机代码：访问了未分配的地址 {address}{line}",
    ),
    "null": (
        "{at}: access through a null pointer{line}: let it point to memory of cudaMalloc, or to a __shared__ array",
        "{at}：访问了空指针{line}：请让它指向 cudaMalloc 分配的内存，或 __shared__ 数组",
    ),
    "null_host": (
        "host code: access through a null pointer{line}",
        "主机代码：访问了空指针{line}",
    ),
    "freed": (
        "{at}: accesses {array}{line}, but cudaFree has freed it: move the cudaFree behind its last use",
        "{at}：访问了 {array}{line}，但它已被 cudaFree 释放：请把 cudaFree 移到最后一次使用之后",
    ),
    "freed_host": (
        "host code: accesses {array}{line}, but cudaFree has freed it",
        "主机代码：访问了 {array}{line}，但它已被 cudaFree 释放",
    ),
    "stack": (
        "{at}: its local variables and calls need more than 512 KB{line}, the limit of a GPU: look for a recursion "
        "that does not end, or move a large array to memory of cudaMalloc",
        "{at}：局部变量和函数调用需要超过 512 KB{line}，这是 GPU 的上限：请检查是否有不会结束的递归，"
        "或者把大数组移到 cudaMalloc 分配的内存里",
    ),
    "division": (
        "{at}: divides an integer by zero{line}: a GPU does not stop there, but the result is undefined",
        "{at}：整数除以零{line}：GPU 不会因此停止，但结果是未定义的",
    ),
    "division_host": ("host code: divides an integer by zero{line}", "主机代码：整数除以零{line}"),
    "assertion": (
        "{at}: its assert failed (see above) or it called abort: a GPU stops with `device-side assert triggered`",
        "{at}：断言（assert）失败（见上文），或调用了 abort：GPU 会报 device-side assert triggered",
    ),
    "race": (
        "kernel {kernel}, block {block}: a race on {memory} memory: thread {its_thread} {its_verb} "
        "{array}[{index}]{its_line} "
        "and thread {thread} {verb} it{line}, and {no_barrier} is between them: their order is undefined, so {remedy}",
        "核函数 {kernel}，线程块 {block}：{memory}内存上的数据竞争：线程 {its_thread} {its_verb} "
        "{array}[{index}]{its_line}，"
        "线程 {thread} {verb}同一个元素{line}，两者之间没有 {no_barrier}：先后次序不确定，{remedy}",
    ),
    "two_lines": (
        "put a barrier between the two accesses, also if they are in different rounds of a loop",
        "请在这两次访问之间同步，它们处于循环的不同轮次时也一样",
    ),
    "one_line": (
        "give each element to one thread (does the index use threadIdx?) or use an atomic operation such as atomicAdd; "
        "if the accesses are in different rounds of a loop, put a barrier between the rounds",
        "请让每个元素只由一个线程处理（下标里用了 threadIdx 吗？），或者使用 atomicAdd 之类的原子操作；"
        "如果两次访问处于循环的不同轮次，请在两轮之间同步",
    ),
    "no_syncthreads": ("no __syncthreads()", "__syncthreads()"),
    "no_syncwarp": ("neither __syncthreads() nor __syncwarp()", "__syncthreads() 或 __syncwarp()"),
    "race_blocks": (
        "kernel {kernel}: a race on device memory: thread {its_thread} of block {its_block} {its_verb} "
        "{array}[{index}]{its_line} and thread {thread} of block {block} {verb} it{line}: blocks run in "
        "any order, so give each element to one block (does the index use blockIdx?), or use an atomic operation "
        "such as atomicAdd",
        "核函数 {kernel}：设备内存上的数据竞争：线程块 {its_block} 的线程 {its_thread} {its_verb} "
        "{array}[{index}]{its_line}，"
        "线程块 {block} 的线程 {thread} {verb}同一个元素{line}：线程块的执行顺序不定，"
        "请让每个元素只由一个线程块处理（下标里用了 blockIdx 吗？），或者使用 atomicAdd 之类的原子操作",
    ),
    "unwritten": (
        "{at}: reads {array}[{index}]{line}, to which nothing was written: {memory} memory is not zero at first",
        "{at}：读了 {array}[{index}]{line}，但此前没有写过它：{memory}内存的初值不是 0",
    ),
    "barrier": (
        "{block}: {threads} at {what}{line}, but {ended} have returned, such as thread "
        "{returned}: on a GPU this is undefined. All threads of the block have to reach the barrier: move it out "
        "of the `if`, and let no thread return before it",
        "{block}：{count} 个线程在 {what} 处等待{line}，但有 {ended} 个线程已经返回，例如线程 "
        "{returned}：这在 GPU 上是未定义行为。线程块的所有线程都必须到达同步点："
        "请把它移到 if 之外，并且不要让线程在它之前返回",
    ),
    "divergent": (
        "{block}: threads of one block wait at different barriers: thread {waiting} at line "
        "{line_number}, thread {other} at "
        "line {its_line_number}: a barrier is inside a branch that not all threads take",
        "{block}：同一线程块的线程停在不同的同步点：线程 {waiting} 在第 {line_number} 行，线程 {other} "
        "在第 {its_line_number} 行："
        "同步点放在了并非所有线程都会进入的分支里",
    ),
    "grid": (
        "kernel {kernel}: block {block} waits at grid.sync(){line}, but block {returned} has returned: all blocks of "
        "the grid have to reach the barrier: move it out of the `if`, and let no block return before it",
        "核函数 {kernel}：线程块 {block} 在 grid.sync() 处等待{line}，但线程块 {returned} 已经返回："
        "网格的所有线程块都必须到达同步点：请把它移到 if 之外，并且不要让线程块在它之前返回",
    ),
    "grid_launch": (
        "kernel {kernel} waits at grid.sync(){line}, which needs a cooperative launch: start it with "
        "cudaLaunchCooperativeKernel instead of <<<...>>>",
        "核函数 {kernel} 在 grid.sync() 处等待{line}，这需要协作启动："
        "请用 cudaLaunchCooperativeKernel 启动，不要用 <<<...>>>",
    ),
    "warp": (
        "{block}: thread {waiting} waits at {what}{line} for the lanes of its mask {mask}, but thread "
        "{missing} {state}: all "
        "lanes of the mask have to execute it",
        "{block}：线程 {waiting} 在 {what} 处等待掩码 {mask} 中的线程{line}，但线程 {missing} {state}："
        "掩码中的所有线程都必须执行它",
    ),
    "returned": ("has returned", "已经返回"),
    "waits": ("waits at {its_what}{its_line}", "停在 {its_what}{its_line}"),
    "not in its own mask": ("is not in its own mask", "不在自己的掩码中"),
    "mbarrier_stuck": (
        "{block}: thread {waiting} waits at {what}{line} for the mbarrier {array}[{index}], phase of parity {parity}, "
        "which can never end: {pending} of {expected} arrivals and {bytes} bytes of copies are missing, and no thread "
        "can go on. Compare the count of mbarrier.init with the threads that arrive, the bytes of expect_tx with those "
        "of the copies, and the parity with the round of the loop",
        "{block}：线程 {waiting} 在 {what} 处等待 mbarrier {array}[{index}]{line}，但奇偶位为 {parity} "
        "的阶段永远不会结束："
        "还缺 {expected} 次到达中的 {pending} 次，以及 {bytes} 字节的复制，而没有线程能继续执行。"
        "请核对 mbarrier.init 的计数与到达的线程数、expect_tx 的字节数与复制的字节数，以及奇偶位与循环的轮次",
    ),
    "mbarrier_surplus": (
        "{block}: thread {waiting} waits at {what}{line} for the mbarrier {array}[{index}], phase of parity {parity}, "
        "which can never end: the copies have brought {bytes} bytes more than expect_tx has announced",
        "{block}：线程 {waiting} 在 {what} 处等待 mbarrier {array}[{index}]{line}，但奇偶位为 {parity} "
        "的阶段永远不会结束："
        "复制的字节数比 expect_tx 声明的多 {bytes}",
    ),
    "mbarrier_misused": (
        "{at}: {what}{line} on {array}[{index}]: {problem}",
        "{at}：{what}{line}，{array}[{index}]：{problem}",
    ),
    "address": (
        "an mbarrier is an object of 8 bytes in shared memory, aligned to 8",
        "mbarrier 是共享内存中按 8 字节对齐的 8 字节对象",
    ),
    "unknown": ("there is no mbarrier: call mbarrier.init first", "这里没有 mbarrier：请先执行 mbarrier.init"),
    "overwritten": (
        "the program has overwritten the mbarrier: look for an index beyond the end of an array next to it",
        "程序覆盖了 mbarrier 的内容：请检查相邻数组的下标是否越界",
    ),
    "count": (
        "its count is {number}, but has to be between 1 and 1048575",
        "计数为 {number}，但必须在 1 到 1048575 之间",
    ),
    "arrivals": (
        "more than the {number} arrivals of mbarrier.init in one phase",
        "同一阶段的到达次数超过了 mbarrier.init 的 {number} 次",
    ),
    "bytes": (
        "{number} bytes are outstanding, but at most 1048575 can be: does each thread execute expect_tx, not only one?",
        "未到达的字节数为 {number}，但最多为 1048575：是否每个线程都执行了 expect_tx，而不是只有一个？",
    ),
    "completes": (
        "an arrival with .noComplete must not be the last one of the phase",
        "带 .noComplete 的到达不能是该阶段的最后一次",
    ),
    "named_stuck": (
        "{block}: thread {waiting} waits at {what} {number}{line}: {arrived} of {expected} threads have "
        "arrived, and no "
        "thread can go on: all threads that the barrier counts have to reach a bar.sync or bar.arrive with its number",
        "{block}：线程 {waiting} 在 {what} {number} 处等待{line}：{expected} 个线程中只有 {arrived} 个到达，"
        "而没有线程能继续执行：同步点所计的每个线程都必须执行该编号的 bar.sync 或 bar.arrive",
    ),
    "named_misused": ("{at}: {what} {number}{line}: {problem}", "{at}：{what} {number}{line}：{problem}"),
    "number": ("barriers have the numbers 0 to 15", "同步点的编号为 0 到 15"),
    "multiple": (
        "{found} threads are no multiple of 32, but a barrier counts whole warps",
        "{found} 个线程不是 32 的倍数，但同步点按整个 warp 计数",
    ),
    "many": (
        "{found} threads are more than the {threads} of the block",
        "{found} 个线程多于线程块的 {threads} 个",
    ),
    "differs": (
        "it counts {found} threads, but others have arrived with another number of threads",
        "它计 {found} 个线程，但其他线程到达时给出的线程数不同",
    ),
    "warpgroup": (
        "{block}: thread {waiting} waits at {what}{line} for its warpgroup, but thread {missing} {state}: all 128 "
        "threads of four warps, the first of which has a number that is a multiple of 4, have to execute it",
        "{block}：线程 {waiting} 在 {what} 处等待它的 warpgroup{line}，但线程 {missing} {state}："
        "四个 warp（首个 warp 的编号是 4 的倍数）的全部 128 个线程都必须执行它",
    ),
    "not there": ("is beyond the end of the block", "超出了线程块的范围"),
    "registers": (
        "{at}: setmaxnreg {count}{line}: the number has to be a multiple of 8 between 24 and 256",
        "{at}：setmaxnreg {count}{line}：数值必须是 24 到 256 之间的 8 的倍数",
    ),
    "in_flight": (
        "{block}: it ends while an asynchronous copy into its shared memory is under way, which thread {waiting} has "
        "begun{line}: wait for its mbarrier before the end",
        "{block}：线程块结束时，线程 {waiting} 发起的写入其共享内存的异步复制{line}还没有完成："
        "结束之前请等待它的 mbarrier",
    ),
    "accumulator": (
        "{at}: {verb} an accumulator of wgmma{line} before the product{its_line} is complete: its value is "
        "undefined until "
        "wgmma.wait_group",
        "{at}：在乘积完成之前{verb}了 wgmma 的累加寄存器{line}（乘积在第 {its_line_number} 行）：执行 "
        "wgmma.wait_group 之前它的值是未定义的",
    ),
    "wgmma_differs": (
        "{at}: wgmma{line}: thread {other} of the warpgroup has begun another product, or none: all 128 "
        "threads have to "
        "execute the same instructions with the same descriptors",
        "{at}：wgmma{line}：同一 warpgroup 的线程 {other} 发起的是另一个乘积，或者没有发起：全部 128 "
        "个线程必须执行相同的指令，描述符也相同",
    ),
    "wgmma_misused": ("{at}: wgmma.mma_async{line}: {problem}", "{at}：wgmma.mma_async{line}：{problem}"),
    "not_awaited": (
        "the thread ends before the product is complete: execute wgmma.commit_group and wgmma.wait_group 0",
        "乘积完成之前线程就结束了：请执行 wgmma.commit_group 和 wgmma.wait_group 0",
    ),
    "no_warpgroup": (
        "it needs four whole warps, the first of which has a number that is a multiple of 4",
        "它需要四个完整的 warp，首个 warp 的编号是 4 的倍数",
    ),
    "no_fence": (
        "execute wgmma.fence before the first product, and again after registers of a product were changed",
        "请在第一个乘积之前执行 wgmma.fence；乘积所用的寄存器改动之后要再次执行",
    ),
    "base_offset": (
        "the base offset (bits 49 to 51) of the descriptor of {operand} is not 0, which the CPU does not have: "
        "align the "
        "tile to 1024 bytes",
        "{operand} 的描述符的基址偏移（第 49 到 51 位）不是 0，CPU 上不支持：请把数据块按 1024 字节对齐",
    ),
    "no_array": (
        "the address in the descriptor of {operand} is in no array in shared memory of this kernel",
        "{operand} 的描述符中的地址不在该核函数的任何共享内存数组里",
    ),
    "beyond": (
        "{operand} reaches beyond the end of its array in shared memory: compare the offsets of the descriptor "
        "(leading, "
        "stride), its swizzle and the tile",
        "{operand} 超出了它的共享内存数组：请核对描述符的偏移量（leading、stride）、交错方式与数据块的大小",
    ),
    "shape": (
        "a product with another number of columns adds to the same accumulators: execute wgmma.wait_group first",
        "列数不同的乘积累加到相同的寄存器：请先执行 wgmma.wait_group",
    ),
    "store_not_waited": (
        "{at}: it ends before its copy from shared to device memory{line} was waited for: the block's shared "
        "memory may "
        "be gone before the copy has read it. Execute cp.async.bulk.commit_group and cp.async.bulk.wait_group 0",
        "{at}：线程结束时，它从共享内存到设备内存的复制{line}还没有等待：复制读完之前，线程块的共享内存可能已经释放。"
        "请执行 cp.async.bulk.commit_group 和 cp.async.bulk.wait_group 0",
    ),
    "copy_misused": ("{at}: {what}{line}: {problem}", "{at}：{what}{line}：{problem}"),
    "shared_address": (
        "the address in shared memory is {number} bytes behind a multiple of 16: declare the array with __align__(16) "
        "or more",
        "共享内存地址比 16 的倍数多 {number} 字节：请用 __align__(16) 或更大的对齐声明数组",
    ),
    "device_address": (
        "the address in device memory is {number} bytes behind a multiple of 16",
        "设备内存地址比 16 的倍数多 {number} 字节",
    ),
    "size": (
        "{number} bytes are copied, but it has to be a multiple of 16",
        "复制 {number} 字节，但字节数必须是 16 的倍数",
    ),
    "not_shared": (
        "the address is not in shared memory: give that of __cvta_generic_to_shared",
        "地址不在共享内存中：请使用 __cvta_generic_to_shared 得到的地址",
    ),
    "map_address": (
        "the tensor map is {number} bytes behind a multiple of 64: pass it as `const __grid_constant__ CUtensorMap`",
        "张量映射的地址比 64 的倍数多 {number} 字节：请以 `const __grid_constant__ CUtensorMap` 的形式传入",
    ),
    "no_map": (
        "there is no tensor map at the address: encode it with cuTensorMapEncodeTiled, check its status, and "
        "pass it as "
        "`const __grid_constant__ CUtensorMap`",
        "该地址没有张量映射：请用 cuTensorMapEncodeTiled 编码并检查返回值，再以 `const __grid_constant__ "
        "CUtensorMap` 的形式传入",
    ),
    "rank": (
        "the tensor map has {number} axes, the instruction another number",
        "张量映射有 {number} 维，与指令的维数不同",
    ),
    "tile_address": (
        "the address in shared memory is {number} bytes behind a multiple of 128: declare the array with "
        "__align__(128), or __align__(1024) for the swizzle over 128 bytes",
        "共享内存地址比 128 的倍数多 {number} 字节：请用 __align__(128) 声明数组，128 字节交错方式用 __align__(1024)",
    ),
    "reduction": (
        "the CPU does not have this reduction for the type of the tensor map (CUtensorMapDataType {number})",
        "CPU 上不支持张量映射的数据类型（CUtensorMapDataType {number}）的这种归约",
    ),
    "other_block": (
        "the destination and the mbarrier are in different blocks of the cluster: map both to the same rank",
        "目标地址与 mbarrier 位于线程块簇的不同线程块：请把两者映射到同一个线程块",
    ),
    "multicast": (
        "the mask {number} of the multicast names blocks that the cluster does not have",
        "多播掩码 {number} 包含线程块簇中不存在的线程块",
    ),
    "cluster_stuck": (
        "{block}: thread {waiting} waits at {what}{line}: {arrived} of {expected} threads of the cluster have "
        "arrived, and "
        "no thread can go on: all threads of all its blocks have to execute barrier.cluster.arrive",
        "{block}：线程 {waiting} 在 {what} 处等待{line}：线程块簇的 {expected} 个线程中只有 {arrived} 个到达，"
        "而没有线程能继续执行：簇中每个线程块的每个线程都必须执行 barrier.cluster.arrive",
    ),
    "cluster_misused": ("{at}: {problem}{line}", "{at}：{problem}{line}"),
    "arrived_twice": (
        "arrives at the barrier of the cluster again before it has waited",
        "还没有等待就再次到达线程块簇的同步点",
    ),
    "not_arrived": (
        "waits at the barrier of the cluster without having arrived",
        "没有到达线程块簇的同步点就等待",
    ),
    "no_rank": (
        "maps an address to block {rank} of a cluster of {count}",
        "把地址映射到线程块簇的第 {rank} 个线程块，但簇中只有 {count} 个",
    ),
    "not_own": (
        "maps an address that is not in the shared memory of its block",
        "映射的地址不在本线程块的共享内存中",
    ),
    "not_waited": (
        "{at}: {verb} {array}[{index}]{line}, but nothing orders that behind the {its_what} of thread "
        "{its_thread}{its_line}, which writes it: {its_wait} first",
        "{at}：{verb}了 {array}[{index}]{line}，但线程 {its_thread} 的{its_what}{its_line}也写它，"
        "而两者之间没有等待：请先{its_wait}",
    ),
    "still_read": (
        "{at}: writes {array}[{index}]{line}, which the {its_what} of thread {its_thread}{its_line} may still read: "
        "{its_wait} first",
        "{at}：写了 {array}[{index}]{line}，但线程 {its_thread} 的{its_what}{its_line}可能还在读它：请先{its_wait}",
    ),
    "copy": ("copy", "异步复制"),
    "product": ("product", "矩阵乘"),
    "store": ("store", "异步写回"),
    "wait_copy": ("wait for the phase of its mbarrier", "等待它的 mbarrier 的阶段结束"),
    "wait_product": ("let that thread execute wgmma.wait_group", "让该线程执行 wgmma.wait_group"),
    "wait_store": ("let that thread execute cp.async.bulk.wait_group", "让该线程执行 cp.async.bulk.wait_group"),
    "proxy_fence": (
        "{at}: its {what} reads {array}[{index}]{line}, which thread {its_thread} has written{its_line} without a "
        "fence.proxy.async since: it may read the old bytes. Execute fence.proxy.async behind the write, before the "
        "barrier",
        "{at}：它的{what}读 {array}[{index}]{line}，线程 {its_thread} 写了它{its_line}，但此后没有执行 "
        "fence.proxy.async："
        "可能读到旧的内容。请在写入之后、同步之前执行 fence.proxy.async",
    ),
    "spin": (
        "{at}: waits in {what}{line} for a value that no other thread writes any more: all threads wait",
        "{at}：在{what}中等待{line}，但不会再有线程写入它等待的值：所有线程都在等待",
    ),
    "spin_launch": (
        "{at}: waits in {what}{line} for a value that no other thread of its block writes: blocks of this launch run "
        "one after the other, in any order. Start kernels whose blocks wait for each other with "
        "cudaLaunchCooperativeKernel",
        "{at}：在{what}中等待{line}，但线程块内没有其他线程写入它等待的值：这次启动的线程块以任意次序先后执行。"
        "线程块之间需要互相等待的核函数，请用 cudaLaunchCooperativeKernel 启动",
    ),
    "a loop": ("a loop", "循环"),
    "an atomic operation": ("an atomic operation", "原子操作"),
    "a volatile access": ("a volatile access", "volatile 访问"),
    "default_stream": (
        "kernel {kernel} is launched into the default stream while another stream captures a graph, which ends the "
        "capture: name the capturing stream in <<<...>>>",
        "捕获图的过程中，核函数 {kernel} 启动到了默认流，捕获因此失败：请在 <<<...>>> 里写明正在捕获的流",
    ),
    "nested": (
        "{at}: launches the kernel {launched}: the CPU does not support dynamic parallelism, launch it from the host",
        "{at}：启动了核函数 {launched}：CPU 上不支持动态并行，请从主机启动它",
    ),
    "endless": (
        "{at}: it does not end{line}: look for a loop whose condition never changes",
        "{at}：没有结束{line}：请检查循环条件是否会变化",
    ),
    "endless_host": ("the program does not end{line}", "程序没有结束{line}"),
    "rejected": ("the compiler rejects the program{line}: {said}{hint}", "编译器报错{line}：{said}{hint}"),
    "assembly": (
        "the compiler rejects an asm statement{line}: the CPU knows those with operands of PTX (h, r, l, f, d, n)",
        "编译器不接受 asm 语句{line}：CPU 上只支持操作数约束为 h、r、l、f、d、n 的 PTX 语句",
    ),
    "ptx_host": (
        "host code: the PTX instruction {instruction}{line} is for kernels",
        "主机代码：PTX 指令 {instruction}{line} 只能用在核函数里",
    ),
    "ptx": (
        "{at}: the CPU does not have the PTX instruction {instruction}{line}: use a function of CUDA in its place, or "
        "a machine with a GPU and nvcc",
        "{at}：CPU 上不支持 PTX 指令 {instruction}{line}：请改用 CUDA 函数，或者在有 GPU 和 nvcc 的机器上运行",
    ),
    "hint_incomplete": (
        ". The statement is not complete: look for a missing ; or ) here or at the end of the line before",
        "。语句不完整：请检查这里或上一行末尾是否缺少分号或括号",
    ),
    "hint_unknown": (
        ". The compiler does not know this name: is it misspelt, or not declared before its first use?",
        "。编译器不认识这个名字：是拼写有误，还是使用之前没有声明？",
    ),
    "hint_cuda": (
        ". It is misspelt, or it belongs to the parts of CUDA that the CPU does not have: then a machine with a GPU "
        "and nvcc runs the program",
        "。名字拼写有误，或者它属于 CPU 上不支持的 CUDA 功能：如是后者，请在有 GPU 和 nvcc 的机器上运行",
    ),
    "hint_library": (
        ". Of CUDA's headers the CPU has cuda_runtime.h, cuda_fp16.h, cuda_bf16.h, cuda_fp8.h, mma.h, "
        "cooperative_groups.h, "
        "cuda_pipeline.h and what they include: a machine with a GPU and nvcc runs programs with others",
        "。CPU 上只有 "
        "cuda_runtime.h、cuda_fp16.h、cuda_bf16.h、cuda_fp8.h、mma.h、cooperative_groups.h、cuda_pipeline.h "
        "及其包含的头文件："
        "用到 CUDA 其他头文件的程序，请在有 GPU 和 nvcc 的机器上运行",
    ),
    "hint_no_rows": (
        ". An array in device memory has one index: row * columns + column instead of [row][column]",
        "。设备内存中的数组只有一个下标：请写 row * columns + column，而不是 [row][column]",
    ),
    "hint_const": (
        ". It is const: the kernel may read it, but not change it",
        "。它是 const：核函数只能读，不能修改",
    ),
    "hint_arguments": (
        ". The call has other arguments than the function has parameters: compare their number and types",
        "。调用的实参与函数的形参不符：请对照个数和类型",
    ),
    "hint_pointer": (
        ". The types do not fit: a pointer is an address, its elements are pointer[index]",
        "。类型不符：指针是地址，它的元素要写成 pointer[index]",
    ),
    "hint_void": (
        ". A kernel returns nothing: it writes its results to device memory",
        "。核函数没有返回值：结果要写到设备内存",
    ),
    "hint_header": (
        ". Include the header of the standard library that declares it: #include <vector> for std::vector",
        "。请包含声明它的标准库头文件：例如 std::vector 需要 #include <vector>",
    ),
    "hint_twice": (". The name is declared twice: rename or remove one", "。这个名字声明了两次：请改名或删去一个"),
    "hint_print": (
        ". A kernel has no standard library: it prints with printf",
        "。核函数里不能使用标准库：请用 printf 输出",
    ),
    "blocks": (
        "{size}: {found} blocks were launched, {needed} are needed: is the number of blocks n / threads, rounded up, "
        "and do the blocks come first in <<<blocks, threads>>>?",
        "{size}：启动了 {found} 个线程块，需要 {needed} 个：线程块数是不是 n / threads 向上取整，"
        "<<<线程块数, 线程数>>> 的次序对吗？",
    ),
    "braces": (
        "the braces do not match: the file has {opened} {{ and {closed} }}",
        "花括号不配对：文件里有 {opened} 个 {{ 和 {closed} 个 }}",
    ),
    "signature": (
        "the test cannot call the functions of this file: {said}. Keep the names and parameters that the "
        "exercise gave them",
        "测试无法调用文件里的函数：{said}。请保留练习给出的函数名和参数",
    ),
    "not_global": (
        "{function} is launched with <<<...>>>, but is not a kernel{line}: write __global__ before its type",
        "{function} 用 <<<...>>> 启动，但它不是核函数{line}：请在它的类型前面写 __global__",
    ),
    "not_device": (
        "a kernel calls {function}{its_line}, which is a function of the host{line}: write __device__ before its type",
        "核函数调用了 {function}{its_line}，但它是主机函数{line}：请在它的类型前面写 __device__",
    ),
    "not_launched": (
        "the kernel {function} is called without <<<blocks, threads>>>{line}: a kernel has to be launched",
        "调用核函数 {function} 时没有写 <<<线程块数, 线程数>>>{line}：核函数必须这样启动",
    ),
    "status": ("{size}: the launch failed: {status}", "{size}：启动失败：{status}"),
    "configuration": (
        "{size}: the launch failed: {status}: a launch needs at least 1 block, and 1 to 1024 threads per block",
        "{size}：启动失败：{status}：至少要有 1 个线程块，每个线程块要有 1 到 1024 个线程",
    ),
    "wrong": (
        "{size}: {array}[{index}] is {found}, expected {expected} (wrong elements: {wrong} of {count})",
        "{size}：{array}[{index}] 是 {found}，应为 {expected}（{count} 个元素中有 {wrong} 个不对）",
    ),
    "missing": (
        "{size}: {array}[{index}] was never written, expected {expected} (wrong elements: {wrong} of {count})",
        "{size}：{array}[{index}] 没有被写过，应为 {expected}（{count} 个元素中有 {wrong} 个不对）",
    ),
}
