// Chapter 7: turn weights of 4 bits into float32: value = (code - 8) * scale.
// 第 7 章：把 4 比特权重还原成 float32：值 = (编码 - 8) * scale。
//
// Each word of `packed` has 8 codes from 0 to 15: code k is in bits 4 k to 4 k + 3. Each 32 weights share a scale.
// Blocks have 128 threads, there is one thread per weight, and n is a multiple of 32.
// packed 的每个字里有 8 个 0 到 15 的编码：第 k 个编码在第 4 k 到 4 k + 3 位。每 32 个权重共用一个 scale。
// 线程块有 128 个线程，每个权重一个线程，n 是 32 的倍数。
//
// Check it with / 检查：  warpbus learn 07.3 --check

__global__ void dequantize(const unsigned *packed, const float *scales, float *weights, int n) {
    // Which word, which bits, and which scale belong to weight i? 第 i 个权重在哪个字、哪几位，用哪个 scale？
}
