// Copies to shared memory by all threads of a group.
#pragma once

#include "../cooperative_groups.h"
#include "../cuda_pipeline.h"

namespace cooperative_groups {

// `size` bytes; a copy happens when its thread waits for it.
template <class Group, class T> void memcpy_async(const Group &group, T *to, const T *from, size_t size) {
    for (size_t i = group.thread_rank(); i < size / sizeof(T); i += group.size())
        warpbus::defer_copy({warpbus::copy_piece<T>, to + i, from + i, sizeof(T), 0, 0});
    warpbus::commit_copies();
}
template <class Group> void wait(const Group &group, WARPBUS_LINE) {
    warpbus::wait_for_copies(0);
    group.sync(line);
}

}  // namespace cooperative_groups
