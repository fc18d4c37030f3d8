"""The device query agrees with what torch knows of the GPU."""

import pytest
import torch

from warpbus.cuda.query import gpu_limits

pytestmark = pytest.mark.gpu


def test_the_limits_of_this_gpu():
    found, known = gpu_limits(0), torch.cuda.get_device_properties(0)
    assert found.capability == f"{known.major}.{known.minor}"
    assert found.multiprocessors == known.multi_processor_count
    assert found.threads_per_multiprocessor == known.max_threads_per_multi_processor
    assert found.warp == known.warp_size
    assert found.l2 == known.L2_cache_size
    assert found.shared_per_block_optin == known.shared_memory_per_block_optin
    assert found.threads_per_block >= 1024
    assert found.block[0] >= 1024
