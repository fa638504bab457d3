# syntax=docker/dockerfile:1
#
#   docker build --target cpu  -t quire:cpu --build-arg PIP_EXTRA_INDEX_URL=INDEX .
#       INDEX is the package index of PyTorch's CPU builds: "Start Locally" on PyTorch's site shows it for Pip and CPU.
#       Without INDEX torch would install some GB of CUDA libraries, so the build stops; --build-arg TORCH_BUILD=any
#       accepts any build of torch.
#   docker build --target cuda -t quire:cuda .
#       PyTorch's CUDA build, which installs its CUDA libraries; the host provides the driver.
#   docker run --stop-timeout 40 -p 127.0.0.1:8000:8000 -v quire-cache:/cache quire:cpu Qwen/Qwen3-0.6B
#
# For Arm: --platform linux/arm64, or both with `docker buildx build --platform linux/amd64,linux/arm64`; the kernels are
# those of the platform's machine.
#
# Arguments after the image's name are passed to `quire serve`. Layers are ordered by how often they change: an edit of
# the sources installs no package again, and the kernels are compiled again only if they or their build script changed.

ARG PYTHON_VERSION=3.11

# ---- the packages, in a virtual environment that the final stages copy

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/quire \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['files'], sep='\n')" > requirements.txt

# The native kernels for every instruction-set level, so that the image needs no compiler. For another kind of machine
# they are cross-compiled: a compiler under emulation is slow.
FROM --platform=$BUILDPLATFORM python:${PYTHON_VERSION}-slim AS kernels
ARG BUILDARCH
ARG TARGETARCH
# hadolint ignore=DL3008
RUN case "$TARGETARCH" in \
        "$BUILDARCH") package=g++ ;; \
        arm64) package=g++-aarch64-linux-gnu ;; \
        amd64) package=g++-x86-64-linux-gnu ;; \
    esac \
    && apt-get update \
    && apt-get install -y --no-install-recommends "$package" \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kernels
COPY worker/cpu/build.py ./
COPY worker/cpu/csrc ./csrc
RUN case "$TARGETARCH" in \
        "$BUILDARCH") compiler=g++ ;; \
        arm64) compiler=aarch64-linux-gnu-g++ ;; \
        amd64) compiler=x86_64-linux-gnu-g++ ;; \
    esac \
    && CXX="$compiler" python build.py --into prebuilt

FROM build AS build-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_BUILD=cpu
# "2.13.0+cpu" satisfies "==2.13.0" and counts as newer, so torch comes from the extra index and all other packages from
# the default one.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$TORCH_BUILD" = cpu ] && [ -z "$PIP_INDEX_URL$PIP_EXTRA_INDEX_URL" ]; then \
        echo "error: set --build-arg PIP_EXTRA_INDEX_URL=INDEX to the package index of PyTorch's CPU builds (see the top of the Dockerfile), or" \
             "accept the CUDA build with --build-arg TORCH_BUILD=any" >&2; \
        exit 1; \
    fi \
    && /opt/quire/bin/pip install -c constraints.txt torch \
    && if [ "$TORCH_BUILD" = cpu ]; then \
        /opt/quire/bin/python -W ignore -c "import sys, torch; \
sys.exit(torch.version.cuda and f'error: torch {torch.__version__} is a CUDA build: check PIP_EXTRA_INDEX_URL, or set --build-arg TORCH_BUILD=any')"; \
    fi
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/quire/bin/pip install -c constraints.txt -r requirements.txt
COPY . .
COPY --from=kernels /kernels/prebuilt ./worker/cpu/prebuilt
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/quire/bin/pip install -c constraints.txt --no-deps . \
    && ln -s /opt/quire/lib/python3.*/site-packages/quire/cli/health.py /opt/quire/health.py
# What no server reads, and symbols: a third of the size.
# hadolint ignore=DL3008,DL3003
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/* \
    && /opt/quire/bin/python tools/slim.py \
    && cd /opt/quire/lib/python3.*/site-packages \
    && find torch/lib hf_xet regex safetensors tokenizers yaml -name '*.so' -exec strip --strip-unneeded {} +

FROM build AS build-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/quire/bin/pip install -c constraints.txt torch
# hadolint ignore=DL3059
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/quire/bin/pip install -c constraints.txt -r requirements.txt
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/quire/bin/pip install -c constraints.txt --no-deps . \
    && ln -s /opt/quire/lib/python3.*/site-packages/quire/cli/health.py /opt/quire/health.py
# The Triton kernels of the usual variants, so that a first start compiles few; no GPU is needed.
ARG CAPABILITIES="80 90 100"
RUN for capability in $CAPABILITIES; do \
        /opt/quire/bin/python -m tools.compile_kernels --cache /opt/quire/share/quire/triton --capability "$capability" \
        || exit 1; \
    done

# ---- common to both images: a user, a cache, a probe

FROM python:${PYTHON_VERSION}-slim AS base
LABEL org.opencontainers.image.title="quire" \
      org.opencontainers.image.description="An OpenAI-compatible inference server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 1000 quire \
    && install -d -o quire -g quire /cache /run/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_PORT=8000 \
    QUIRE_ADDRESS_FILE=/run/quire/address
USER 1000
WORKDIR /home/quire
VOLUME /cache
EXPOSE 8000
# /health is 503 until the model is loaded, and when the engine is gone. The check reads the address that the server
# wrote, so it works with any --port and --uds; with --read-only it uses QUIRE_HOST and QUIRE_PORT. It is `quire health`
# without the imports of the quire command. (podman 4 stops at --start-interval.)
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-I", "-S", "/opt/quire/health.py"]
ENTRYPOINT ["quire", "serve"]

FROM base AS cuda
# Triton compiles a small C launcher for each kernel.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000
COPY --from=build-cuda /opt/quire /opt/quire

# the default target
FROM base AS cpu
COPY --from=build-cpu /opt/quire /opt/quire
