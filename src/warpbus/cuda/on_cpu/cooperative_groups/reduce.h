// Reductions of a tile, and of lanes that run together.
#pragma once

#include "../cooperative_groups.h"

namespace cooperative_groups {

template <unsigned Size, class T, class Join> T reduce(const warp_tile<Size> &tile, T value, Join join, WARPBUS_LINE) {
    return warpbus::reduce_lanes(tile.lanes(), value, "reduce", line, join);
}

template <class T, class Join> T reduce(const coalesced_group &group, T value, Join join, WARPBUS_LINE) {
    return warpbus::reduce_lanes(group.lanes(), value, "reduce", line, join);
}

}  // namespace cooperative_groups
