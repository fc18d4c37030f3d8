// The epilogue of a matrix product: add a bias, apply an activation, round, store. One object per thread, for 8
// neighbouring columns of which the thread finishes several rows.
#pragma once

#include "common/numeric.cuh"

template <typename T>
class Epilogue {
public:
    static constexpr int kColumns = 8;  // 16 bytes of the output

    // bias: [n] or null. out: [m, n] with rows `stride` elements apart. `column`: the first of the 8.
    __device__ Epilogue(const T* bias, int activation, T* out, long long stride, int n, int column)
        : out_(out + column), stride_(stride), columns_(min(n - column, kColumns)), activation_(activation) {
        const bool aligned = reinterpret_cast<unsigned long long>(out) % 16 == 0 && stride % kColumns == 0;
        whole_ = aligned && columns_ == kColumns;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            bias_[i] = bias != nullptr && i < columns_ ? to_float(bias[column + i]) : 0.0f;
        }
    }

    // Finishes one row's sums, in one store of 16 bytes where the place allows it.
    __device__ __forceinline__ void store(float (&sums)[kColumns], int row) const {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[i] += bias_[i];
        if (activation_ != kNone) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sums[i] = activate(activation_, sums[i]);
        }
        Vector16<T> rounded;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) rounded.element[i] = from_float<T>(sums[i]);
        T* target = out_ + row * stride_;
        if (whole_) {
            *reinterpret_cast<Vector16<T>*>(target) = rounded;
        } else {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                if (i < columns_) target[i] = rounded.element[i];
            }
        }
    }

private:
    T* out_;
    long long stride_;
    int columns_;
    int activation_;
    bool whole_;
    float bias_[kColumns];
};
