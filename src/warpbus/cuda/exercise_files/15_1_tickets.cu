// Chapter 15: work that can be stopped and go on elsewhere: blocks take tiles of 64 numbers from a common counter.
// 第 15 章：可以停下、换个地方继续的工作：各线程块从一个公共计数器领取分块，每块 64 个数。
//
// *next is the first tile that nobody has taken, and all that another GPU needs to go on. A block of 64 threads takes one
// tile after the other until the tiles end at `stop`: its thread 0 increments *next, and all threads learn the ticket.
// For each number of a tile, y = x * x. The last ticket of each block lies at or behind `stop`: undo it, so that *next is
// `stop` at the end.
// *next 是第一个还没有被领取的分块；另一块 GPU 要接着做，只需要这个数。64 线程的线程块一块接一块地领，直到 stop 为止：
// 0 号线程把 *next 加一，其余线程要得知领到的号。分块里的每个数 y = x * x。每个线程块最后领到的号不小于 stop，
// 要退回去，使结束时 *next 等于 stop。
//
// Check it with / 检查：  warpbus learn 15.1 --check

__global__ void squares(const float *x, float *y, int *next, int stop) {
    __shared__ int ticket;
    // while (true): thread 0 takes a ticket; a barrier; all read it; a barrier, before thread 0 writes it again.
    // 循环：0 号线程领号；同步；所有线程读号；0 号线程再次写之前还要同步。
}
