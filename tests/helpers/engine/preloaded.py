"""Imports the modules that an engine's process imports before its configuration, torch included."""

from quire.engine import core  # noqa: F401
from quire.engine.executor.base import import_executor

import_executor("uniproc")
