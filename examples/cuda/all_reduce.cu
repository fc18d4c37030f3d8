// All-reduce: every GPU gets the sum of what all of them have, in one step or around a ring. Four ranks take the GPUs of
// the machine in turn, so it also runs on one GPU.
//
//     warpbus cuda run examples/cuda/all_reduce.cu
#include "check.h"

#include <vector>

constexpr int kRanks = 4;

struct Pointers { float *of[kRanks]; };

// One step: reads what all ranks have, over peer access, and adds in the order of the ranks.
__global__ void one_shot(Pointers parts, float *sum, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float found = 0;
    for (int rank = 0; rank < kRanks; ++rank) found += parts.of[rank][i];
    sum[i] = found;
}

__global__ void add(const float *received, float *own, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) own[i] += received[i];
}

int device_of(int rank) {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    return rank % count;
}

// Whether all pairs of the GPUs in use can read each other's memory.
bool connect() {
    for (int rank = 0; rank < kRanks; ++rank)
        for (int peer = 0; peer < kRanks; ++peer) {
            if (device_of(rank) == device_of(peer)) continue;
            int can = 0;
            CHECK(cudaDeviceCanAccessPeer(&can, device_of(rank), device_of(peer)));
            if (!can) return false;
            CHECK(cudaSetDevice(device_of(rank)));
            cudaDeviceEnablePeerAccess(device_of(peer), 0);
            cudaGetLastError();  // it may have been enabled already
        }
    return true;
}

void wait_for_all() {
    for (int rank = 0; rank < kRanks; ++rank) {
        CHECK(cudaSetDevice(device_of(rank)));
        CHECK_LAUNCH();
    }
}

// Each rank sends one of kRanks pieces to its neighbour: first to add, until every piece has been everywhere, then to keep.
void ring(Pointers data, Pointers received, int n) {
    const int piece = n / kRanks;
    for (int step = 0; step < 2 * (kRanks - 1); ++step) {
        for (int rank = 0; rank < kRanks; ++rank) {
            const int next = (rank + 1) % kRanks, sent = (rank - step + 2 * kRanks) % kRanks * piece;
            const bool adds = step < kRanks - 1;
            float *to = adds ? received.of[next] : data.of[next] + sent;
            CHECK(cudaMemcpyPeer(to, device_of(next), data.of[rank] + sent, device_of(rank), piece * sizeof(float)));
        }
        wait_for_all();
        for (int rank = 0; step < kRanks - 1 && rank < kRanks; ++rank) {
            const int arrived = (rank - 1 - step + 2 * kRanks) % kRanks * piece;
            CHECK(cudaSetDevice(device_of(rank)));
            add<<<(piece + 255) / 256, 256>>>(received.of[rank], data.of[rank] + arrived, piece);
        }
        wait_for_all();
    }
}

int main() {
    const int n = 4096;
    std::vector<std::vector<float>> parts(kRanks, std::vector<float>(n));
    for (int rank = 0; rank < kRanks; ++rank)
        for (int i = 0; i < n; ++i) parts[rank][i] = 0.1f * ((i * 7 + rank * 13) % 101) - 5;

    Pointers data, received, sums;
    for (int rank = 0; rank < kRanks; ++rank) {
        CHECK(cudaSetDevice(device_of(rank)));
        CHECK(cudaMalloc(&data.of[rank], n * sizeof(float)));
        CHECK(cudaMalloc(&received.of[rank], n * sizeof(float)));
        CHECK(cudaMalloc(&sums.of[rank], n * sizeof(float)));
        CHECK(cudaMemcpy(data.of[rank], parts[rank].data(), n * sizeof(float), cudaMemcpyHostToDevice));
    }

    int wrong = 0;
    std::vector<std::vector<float>> found(kRanks, std::vector<float>(n));
    const auto compare = [&](const char *name, const Pointers &from) {
        int bad = 0, unequal = 0;
        for (int rank = 0; rank < kRanks; ++rank)
            CHECK(cudaMemcpy(found[rank].data(), from.of[rank], n * sizeof(float), cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; ++i) {
            double expected = 0;
            for (int rank = 0; rank < kRanks; ++rank) expected += parts[rank][i];
            for (int rank = 0; rank < kRanks; ++rank) {
                bad += !(found[rank][i] - expected < 1e-5 && expected - found[rank][i] < 1e-5);
                unequal += found[rank][i] != found[0][i];
            }
        }
        printf("%s: %s, %s\n", name, bad ? "wrong" : "all match the CPU",
               unequal ? "the ranks differ" : "the same bits on every rank");
        wrong += bad + unequal;
    };

    if (connect()) {
        for (int rank = 0; rank < kRanks; ++rank) {
            CHECK(cudaSetDevice(device_of(rank)));
            one_shot<<<(n + 255) / 256, 256>>>(data, sums.of[rank], n);
        }
        wait_for_all();
        compare("one shot", sums);
    } else {
        printf("one shot: the GPUs cannot read each other's memory\n");
    }
    ring(data, received, n);
    compare("ring", data);
    for (int rank = 0; rank < kRanks; ++rank)
        for (float *each : {data.of[rank], received.of[rank], sums.of[rank]}) CHECK(cudaFree(each));
    return wrong != 0;
}
