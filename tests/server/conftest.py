"""Servers for the tests."""

from tests.helpers.server.running import model_folder, server, slow_server  # noqa: F401
