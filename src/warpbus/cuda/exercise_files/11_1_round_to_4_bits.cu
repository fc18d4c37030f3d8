// Chapter 11: round weights to 4 bits in groups of 32, one warp per group: scale = max |w| / 7, code = round(w / scale) + 8.
// 第 11 章：把权重按 32 个一组量化为 4 比特，每组一个线程束：scale = max |w| / 7，code = round(w / scale) + 8。
//
// Codes are from 1 to 15, here one per byte; n is a multiple of 32. A group of zeros gets scale 0 and codes 8.
// 编码从 1 到 15，这里每个占一个字节；n 是 32 的倍数。全零的一组，scale 为 0，编码为 8。
//
// Check it with / 检查：  warpbus learn 11.1 --check

__global__ void round_to_4_bits(const float *weights, unsigned char *codes, float *scales, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;  // whole warps, since n is a multiple of 32. n 是 32 的倍数，返回的都是整个线程束。
    // The largest |w| of the group by shuffles; rintf rounds to the nearest. 用 shuffle 求组内最大的 |w|；rintf 取最近的整数。
}
