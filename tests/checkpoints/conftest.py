"""Fixtures of native kernels."""

from tests.helpers.server.running import model_folder, server, slow_server  # noqa: F401
from tests.helpers.worker.kernel_fixtures import exact_activations, kernels, native_kernels, rng  # noqa: F401
