"""Fixtures of native kernels."""

from tests.helpers.worker.kernel_fixtures import exact_activations, kernels, native_kernels, rng  # noqa: F401
