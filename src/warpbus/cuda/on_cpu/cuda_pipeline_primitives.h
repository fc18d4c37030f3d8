// A part of CUDA's header, here the same.
#pragma once
#include "cuda_pipeline.h"
