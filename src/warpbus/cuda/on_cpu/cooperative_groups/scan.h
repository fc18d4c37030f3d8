// Prefix sums of a tile.
#pragma once

#include "../cooperative_groups.h"

namespace cooperative_groups {

template <unsigned Size, class T, class Join>
T inclusive_scan(const warp_tile<Size> &tile, T value, Join join, WARPBUS_LINE) {
    for (unsigned by = 1; by < Size; by *= 2) {
        const T its = tile.shfl_up(value, by, line);
        if (tile.thread_rank() >= by) value = join(its, value);
    }
    return value;
}
template <unsigned Size, class T> T inclusive_scan(const warp_tile<Size> &tile, T value, WARPBUS_LINE) {
    return inclusive_scan(tile, value, plus<T>(), line);
}
template <unsigned Size, class T, class Join>
T exclusive_scan(const warp_tile<Size> &tile, T value, Join join, WARPBUS_LINE) {
    const T its = tile.shfl_up(inclusive_scan(tile, value, join, line), 1, line);
    return tile.thread_rank() ? its : T{};
}
template <unsigned Size, class T> T exclusive_scan(const warp_tile<Size> &tile, T value, WARPBUS_LINE) {
    return exclusive_scan(tile, value, plus<T>(), line);
}

}  // namespace cooperative_groups
