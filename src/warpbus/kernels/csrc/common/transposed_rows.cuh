// The rows of a product that a warp has computed as its transpose with mma.m16n8, for an epilogue.
#pragma once

// Passes the rows of a warp's part of out to `finish(sums, row)`, 8 columns per lane, from column lane % (columns / 8) * 8 on;
// the part has 16 BlocksN columns, 32 or 64, and 8 BlocksM rows. `patch` has room for 8 rows of its columns plus 4 floats.
//
// A lane has sums of 2 adjacent rows and of columns 8 apart, so they are exchanged through shared memory, 8 rows at a time,
// without bank conflicts: rows are kColumns + 4 floats apart, so that the 4 pairs of rows that a warp stores start 8 banks
// apart and the 8 columns of each fill the gaps. Loads are 16 bytes per lane, 8 lanes at a time: from two rows, which are 4
// banks apart, or from one row, where 4 lanes load their second 16 bytes first.
template <int BlocksN, int BlocksM, typename Finish>
__device__ __forceinline__ void finish_rows(const float (&sums)[BlocksN][BlocksM][4], float* patch, Finish finish) {
    constexpr int kColumns = 16 * BlocksN;
    constexpr int kPitch = kColumns + 4;
    constexpr int kLanesOfRow = kColumns / 8;
    static_assert(kColumns == 32 || kColumns == 64, "a row has 4 or 8 lanes");
    const int lane = threadIdx.x % 32;
    const int half = kLanesOfRow == 8 ? lane / 4 % 2 : 0;
#pragma unroll
    for (int j = 0; j < BlocksM; ++j) {
        __syncwarp();  // the buffer has been read
#pragma unroll
        for (int i = 0; i < BlocksN; ++i) {
            float* target = patch + lane % 4 * 2 * kPitch + i * 16 + lane / 4;
            target[0] = sums[i][j][0];
            target[kPitch] = sums[i][j][1];
            target[8] = sums[i][j][2];
            target[kPitch + 8] = sums[i][j][3];
        }
        __syncwarp();  // the buffer is complete
#pragma unroll 1
        for (int row = lane / kLanesOfRow; row < 8; row += 32 / kLanesOfRow) {
            const float* source = patch + row * kPitch + lane % kLanesOfRow * 8;
            const float4 first = *reinterpret_cast<const float4*>(source + half * 4);
            const float4 second = *reinterpret_cast<const float4*>(source + (1 - half) * 4);
            const float4 low = half ? second : first;
            const float4 high = half ? first : second;
            float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            finish(values, j * 8 + row);
        }
    }
}
