// Programs include it for what is in `cuda_runtime.h` here.
#pragma once

#include "cuda_runtime.h"
