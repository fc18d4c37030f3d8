"""One model before and after: CPU and GPUs, 16 bits and fewer, generation, training and quantization."""
