// Launches one kernel as a job of `simulated.py` says. In front of this text is the kernel's source; the macros are:
//   KERNEL   its name
//   LAUNCH   cudaLaunchKernel, or cudaLaunchCooperativeKernel where blocks may wait for each other
// The directory of the first argument has the files `job`, numbers; `parameters`, the kernel's parameters in one; and the
// bytes of each storage, named by its number, which are written again when the kernel has ended.
#include <cudaTypedefs.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
static void expect(bool right, const char* what) {
    if (right) return;
    fprintf(stderr, "%s\n", what);
    exit(3);
}
static std::vector<unsigned char> contents(const std::string& name) {
    FILE* file = fopen(name.c_str(), "rb");
    expect(file != nullptr, name.c_str());
    std::vector<unsigned char> bytes;
    unsigned char piece[1 << 16];
    for (size_t count; (count = fread(piece, 1, sizeof piece, file)) > 0;) bytes.insert(bytes.end(), piece, piece + count);
    fclose(file);
    return bytes;
}
int main(int, char** arguments) {
    const std::string place = arguments[1];
    FILE* job = fopen((place + "/job").c_str(), "r");
    expect(job != nullptr, "job");
    const auto number = [&] {
        long long value;
        expect(fscanf(job, "%lld", &value) == 1, "a number of the job");
        return value;
    };
    unsigned sides[6];
    for (unsigned& side : sides) side = number();
    const size_t shared = number();
    std::vector<unsigned char> parameters = contents(place + "/parameters");
    std::vector<size_t> offsets(number());
    for (size_t& offset : offsets) offset = number();
    std::vector<unsigned char*> storages(number());
    std::vector<size_t> sizes;
    for (size_t i = 0; i < storages.size(); ++i) {
        const auto bytes = contents(place + "/" + std::to_string(i));
        sizes.push_back(bytes.size());
        cudaMalloc(&storages[i], bytes.size() + 1);
        cudaMemcpy(storages[i], bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    }
    for (long long left = number(); left > 0; --left) {
        const long long at = number(), storage = number(), offset = number();
        const unsigned char* address = storages[storage] + offset;
        memcpy(parameters.data() + at, &address, sizeof address);
    }
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
    for (long long left = number(); left > 0; --left) {
        const long long at = number(), element = number(), rank = number(), storage = number(), offset = number();
        cuuint64_t extents[5] = {}, strides[5] = {};
        cuuint32_t box[5] = {}, steps[5] = {1, 1, 1, 1, 1};
        for (int i = 0; i < rank; ++i) extents[i] = number();
        for (int i = 0; i + 1 < rank; ++i) strides[i] = number();
        for (int i = 0; i < rank; ++i) box[i] = number();
        alignas(64) CUtensorMap map;
        const CUresult status = reinterpret_cast<PFN_cuTensorMapEncodeTiled>(entry)(
            &map, static_cast<CUtensorMapDataType>(element), rank, storages[storage] + offset, extents, strides, box, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(number()), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        expect(status == CUDA_SUCCESS, "a tensor map");
        memcpy(parameters.data() + at, &map, sizeof map);
    }
    std::vector<void*> values;
    alignas(64) static unsigned char copy[1 << 14];
    expect(parameters.size() <= sizeof copy, "parameters");
    memcpy(copy, parameters.data(), parameters.size());
    for (const size_t offset : offsets) values.push_back(copy + offset);
    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    const cudaError_t status = LAUNCH((void*)KERNEL, dim3(sides[0], sides[1], sides[2]), dim3(sides[3], sides[4], sides[5]),
                                      values.data(), shared, 0);
    expect(status == cudaSuccess, cudaGetErrorString(status));
    expect(cudaDeviceSynchronize() == cudaSuccess, "the kernel");
    for (size_t i = 0; i < storages.size(); ++i) {
        std::vector<unsigned char> bytes(sizes[i]);
        cudaMemcpy(bytes.data(), storages[i], bytes.size(), cudaMemcpyDeviceToHost);
        FILE* file = fopen((place + "/" + std::to_string(i)).c_str(), "wb");
        fwrite(bytes.data(), 1, bytes.size(), file);
        fclose(file);
    }
}
