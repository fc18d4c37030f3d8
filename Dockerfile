# warpbus serve in a container, on an NVIDIA GPU (with the NVIDIA Container Toolkit) or on the CPU.
#
#     docker build --tag warpbus .
#     docker run --rm --gpus all warpbus doctor
#
# For a host without a GPU, --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu makes a smaller image.
# compose.yaml serves a model.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04

# g++ compiles the kernels of the CPU, for models and experts that run there.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 warpbus \
    && install --directory --owner warpbus /models /cache

ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN python3 -m venv /opt/warpbus \
    && /opt/warpbus/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"

COPY pyproject.toml README.md LICENSE MANIFEST.in /tmp/warpbus/
COPY src /tmp/warpbus/src
RUN /opt/warpbus/bin/pip install --no-cache-dir '/tmp/warpbus[cuda,serve]' && rm -rf /tmp/warpbus

# Downloaded models and compiled kernels outlive the container where /cache is a volume. MODEL is a path below /models,
# a name on a hub, or demo.
ENV PATH=/opt/warpbus/bin:$PATH HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
USER warpbus
WORKDIR /models
EXPOSE 8000
ENTRYPOINT ["warpbus"]
CMD ["doctor"]
