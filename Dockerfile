# syntax=docker/dockerfile:1
#
#   docker build --target cpu  -t quire:cpu --build-arg PIP_EXTRA_INDEX_URL=INDEX .
#       INDEX is the package index of PyTorch's CPU builds (see "Install" on PyTorch's site): the image stays small. Without it torch brings its CUDA libraries.
#   docker build --target cuda -t quire:cuda .      PyTorch's CUDA build, which brings its CUDA libraries; the host brings the driver
#   docker run -p 127.0.0.1:8000:8000 -v quire-cache:/cache quire:cpu Qwen/Qwen3-0.6B
#
# What follows the image's name are arguments of `quire serve`.

ARG PYTHON_VERSION=3.11

# ---- the packages, in a virtual environment that the last stages copy

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
WORKDIR /src
COPY constraints.txt ./

FROM build AS build-cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++
# "2.13.0+cpu" satisfies "==2.13.0" and counts as newer, so torch comes from this index, if given, and the other packages from the usual one.
ARG PIP_EXTRA_INDEX_URL=
RUN /opt/quire/bin/pip install -c constraints.txt torch
COPY . .
# The native kernels of every instruction-set level are compiled here, so that the image needs no compiler. They go into the installed package.
RUN /opt/quire/bin/pip install -c constraints.txt . \
    && /opt/quire/bin/quire build-kernels

FROM build AS build-cuda
RUN /opt/quire/bin/pip install -c constraints.txt torch
COPY . .
RUN /opt/quire/bin/pip install -c constraints.txt .

# ---- what both images have in common: a user, a cache, a probe

FROM python:${PYTHON_VERSION}-slim AS base
RUN useradd --create-home --uid 1000 quire \
    && install -d -o quire -g quire /cache
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_PORT=8000
USER 1000
WORKDIR /home/quire
VOLUME /cache
EXPOSE 8000
# /health is 503 until the model is loaded, and again when the engine is gone.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"QUIRE_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["quire", "serve"]

FROM base AS cuda
# Triton compiles a small C launcher for each of its kernels.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000
COPY --from=build-cuda /opt/quire /opt/quire

# the last stage is the default
FROM base AS cpu
COPY --from=build-cpu /opt/quire /opt/quire
