// Chapter 12: what the hardware does at each access: translate an address by a page table.
// 第 12 章：硬件在每次访问时做的事：用页表翻译地址。
//
// A page has 64 numbers. Page p of the addresses is page table[p] of `memory`, or is not mapped if table[p] is -1. Read
// address i for each i below n: y[i] is the number there, or 0 if its page is not mapped. *faults counts the latter.
// 一页有 64 个数。第 p 页地址对应 memory 的第 table[p] 页；table[p] 为 -1 表示没有映射。对小于 n 的每个 i 读地址 i：
// y[i] 是那里的数；所在页没有映射时取 0，并计入 *faults。
//
// Check it with / 检查：  warpbus learn 12.1 --check

__global__ void read_mapped(const float *memory, const int *table, float *y, int *faults, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    // Which page, and which place within it? Is the page mapped? 哪一页、页内第几个？这一页映射了吗？
}
