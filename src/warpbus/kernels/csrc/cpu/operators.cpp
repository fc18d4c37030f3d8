// The functions that Python calls: warpbus/kernels/ops/cpu_*.py.
#include "cpu/attention.h"
#include "cpu/experts.h"
#include "cpu/linear.h"
#include "cpu/trellis.h"

extern "C" {

void warpbus_linear(const Linear* task) { linear(*task); }

void warpbus_experts(const Experts* task) { experts(*task); }

void warpbus_attention(const Attention* task) { decode_attention(*task); }

void warpbus_trellis(const TrellisSearch* task) { trellis_search(*task); }
}
