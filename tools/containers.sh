#!/usr/bin/env bash
# tools/containers.sh: build the CPU image, run it as it is deployed, and print its size; ends with "healthy".
#
# Needs podman or docker (CONTAINER_TOOL), as root or rootless; podman needs no daemon. Without a registry, the base
# image is made by mmdebstrap. Variables: TORCH_WHEEL is a file with a CPU build of torch, or PIP_EXTRA_INDEX_URL is an
# index of them; PIP_CERT is a bundle of certificates for the index; RUNTIME is podman's runtime (crun does not know
# every kind of cgroups: runc); RUN_FLAGS are more flags of `run` ("--ulimit nofile=4096:4096 --ulimit nproc=4096:4096"
# where podman has no CAP_SYS_RESOURCE to raise limits with); COMPOSE is "docker compose" or podman-compose with its
# flags: then the service `cpu` of compose.yaml is started and stopped, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tool=${CONTAINER_TOOL:-$(command -v podman || command -v docker)}
base=docker.io/library/python:3.11-slim image=localhost/quire:cpu name=quire-trial-$$
read -ra run_flags <<<"${RUN_FLAGS:-}"
scratch=$(mktemp -d) log=${LOG:-$scratch/build.log}
max_bytes=850000000 # over the base image

container() { "$tool" ${RUNTIME:+--runtime "$RUNTIME"} "$@"; }
say() { printf '%s\n' "$*"; }
fail() { say "error: $*" >&2; exit 1; }
cleanup() {
    container rm --force --time 0 "$name" >/dev/null 2>&1 || true
    "$tool" volume rm "$name" >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap cleanup EXIT

make_base() {
    if "$tool" image inspect "$base" >/dev/null 2>&1 || "$tool" pull -q "$base" >/dev/null 2>&1; then return; fi
    command -v mmdebstrap >/dev/null || fail "no registry answers, and mmdebstrap, which would make a base, is not installed"
    say "no registry answers: making a base image from Debian's packages"
    mmdebstrap --quiet --variant=minbase \
        --include=python3,python3-venv,python-is-python3,ca-certificates,usr-is-merged \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin' bookworm "$scratch/base.tar"
    "$tool" import "$scratch/base.tar" "$base" >/dev/null
}

# An index that has the wheel TORCH_WHEEL only, for PIP_EXTRA_INDEX_URL.
index_of_wheel() {
    mkdir -p "$scratch/index/torch"
    cp "$TORCH_WHEEL" "$scratch/index/torch/"
    local file
    file=$(basename "$TORCH_WHEEL")
    printf '<a href="%s">%s</a>\n' "${file//+/%2B}" "$file" >"$scratch/index/torch/index.html"
}

build() {
    local arguments=(--target cpu --tag "$image")
    if [[ $tool == *podman ]]; then
        arguments+=(--pull=never --isolation chroot --format docker) # OCI images have no HEALTHCHECK
        if [[ -n ${PIP_CERT:-} ]]; then
            arguments+=(--volume "$PIP_CERT:/etc/ssl/certs/ca-certificates.crt:ro" --env "PIP_CERT=/etc/ssl/certs/ca-certificates.crt" --unsetenv PIP_CERT)
        fi
        if [[ -n ${TORCH_WHEEL:-} ]]; then
            index_of_wheel
            arguments+=(--volume "$scratch/index:/index:ro" --build-arg PIP_EXTRA_INDEX_URL=file:///index)
        fi
    fi
    if [[ -z ${TORCH_WHEEL:-} ]]; then arguments+=(--build-arg "PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}"); fi
    "$tool" build "${arguments[@]}" . >"$log" 2>&1 || { tail -40 "$log" >&2; fail "the build failed"; }
}

# Start the container and set `address`.
start() {
    container run "${run_flags[@]}" --detach --name "$name" --read-only --tmpfs /tmp --user 1000 --cap-drop all \
        --security-opt no-new-privileges --stop-timeout 40 --publish 127.0.0.1::8000 --volume "$name:/cache" "$image" \
        >/dev/null
    address=$(container port "$name" 8000 | head -1)
}

wait_healthy() {
    local started=$SECONDS
    until probe >/dev/null 2>&1; do
        [[ $(container inspect --format '{{.State.Running}}' "$name") == true ]] || { container logs "$name" >&2; fail "the container ended"; }
        ((SECONDS - started < 120)) || { container logs "$name" >&2; fail "not healthy after 120 s"; }
        sleep 1
    done
    say "the image's HEALTHCHECK passes after $((SECONDS - started)) s"
}

# Run the HEALTHCHECK of the image once. Without systemd, podman has no timer for it.
probe() {
    if [[ $tool == *podman ]]; then
        container healthcheck run "$name"
    else
        [[ $(container inspect --format '{{.State.Health.Status}}' "$name") == healthy ]]
    fi
}

ask() {
    curl --fail --silent --show-error --max-time 60 "http://$address/v1/chat/completions" \
        -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}'
}

stop() {
    local started=$SECONDS code
    container stop "$name" >/dev/null
    code=$(container inspect --format '{{.State.ExitCode}}' "$name")
    ((code == 0 && SECONDS - started < 40)) || { container logs "$name" >&2; fail "SIGTERM ended the server with $code"; }
    container logs "$name" 2>&1 | grep -q "shutdown complete" || fail "the server did not drain"
    say "SIGTERM: drained and ended after $((SECONDS - started)) s"
    container rm "$name" >/dev/null
}

check_contents() {
    container exec "$name" python -c 'import shutil, sys; sys.exit(any(map(shutil.which, ("cc", "gcc", "g++", "clang"))))' ||
        fail "the image has a compiler"
    container exec "$name" python -c 'import os, sys; sys.exit(os.getuid() != 1000)' || fail "the server is not uid 1000"
    if container exec "$name" sh -c 'touch /opt/quire/trial' 2>/dev/null; then fail "the file system is writable"; fi
    container logs "$name" 2>&1 | grep -q "kernels *= native" || fail "the first request is not served by native kernels"
}

report_size() {
    local all below
    all=$("$tool" image inspect --format '{{.Size}}' "$image")
    below=$("$tool" image inspect --format '{{.Size}}' "$base")
    say "size: $((all / 1000000)) MB, of which $((below / 1000000)) MB are the base image"
    ((all - below <= max_bytes)) || fail "more than $((max_bytes / 1000000)) MB over the base image"
}

try_compose() {
    local port
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export MODEL=quire-tiny PORT=$port
    "$tool" tag "$image" quire:cpu
    # shellcheck disable=SC2086 # a command and its flags
    $COMPOSE up --detach cpu >>"$log" 2>&1 || { tail -20 "$log" >&2; fail "compose up failed"; }
    address=127.0.0.1:$port
    curl --fail --silent --retry 60 --retry-delay 1 --retry-all-errors --output /dev/null "http://$address/health" ||
        fail "the service is not ready after 60 s"
    ask | head -c 120 && say
    # shellcheck disable=SC2086
    $COMPOSE down --volumes >>"$log" 2>&1 || { tail -20 "$log" >&2; fail "compose down failed"; }
    say "compose: the service cpu answered and ended"
}

make_base
build
report_size
for round in "empty cache" "filled cache"; do
    say "run with $round"
    start
    wait_healthy
    ask | head -c 300 && say
    check_contents
    stop
done
if [[ -n ${COMPOSE:-} ]]; then try_compose; fi
say healthy
