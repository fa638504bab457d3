"""Raise the limit of open files, derive the limit of connections, and limit the rate of related log lines."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from quire.configs import platforms

if TYPE_CHECKING:  # a process starts its engine after importing this file, and before that package
    import asyncio

logger = logging.getLogger("quire")

BACKLOG = 1024  # connections that the kernel queues until we accept them
ACCEPTS_PER_TURN = 16  # connections accepted per event loop iteration; they have descriptors before they are counted
RESERVED_DESCRIPTORS = 128  # for engines, files, and connections that are not counted yet or are being closed
MOST_DESCRIPTORS = 1 << 20
ACCEPT_LOG_INTERVAL = 10.0  # seconds between errors logged when no connection can be accepted


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files and connections as the system allows."""
    soft, hard = platforms.open_files_limits()
    target = MOST_DESCRIPTORS if hard == platforms.UNLIMITED else min(hard, MOST_DESCRIPTORS)
    if soft != platforms.UNLIMITED and soft < target:
        try:
            platforms.set_open_files_limit(target, hard)
        except (ValueError, OSError) as error:  # macOS has a second, unpublished limit
            logger.warning("the limit of %d open files cannot be raised: %s", soft, error)


def max_connections() -> int:
    """Return the number of connections that the limit of open files allows."""
    soft, _ = platforms.open_files_limits()
    soft = MOST_DESCRIPTORS if soft == platforms.UNLIMITED else soft
    return max(soft - RESERVED_DESCRIPTORS, soft // 2)


def complain_once_about_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most one failed accept per ACCEPT_LOG_INTERVAL; asyncio reports thousands per second."""
    silent_until = 0.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal silent_until
        if not isinstance(context.get("exception"), OSError) or "socket" not in context:
            loop.default_exception_handler(context)
        elif time.monotonic() >= silent_until:
            silent_until = time.monotonic() + ACCEPT_LOG_INTERVAL
            logger.error("cannot accept connections: %s", context["exception"])

    loop.set_exception_handler(handle)
