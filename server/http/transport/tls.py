"""TLS: the certificate of the server, those of its clients, and renewed files."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from quire.configs.serving import ServerConfig

logger = logging.getLogger("quire.tls")

RELOAD_SECONDS = 1.0  # between checks of the files
_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Tls:
    """The context of all connections. `watch` reloads renewed files; open connections keep their context."""

    def __init__(self, config: ServerConfig):
        """Load the files. Raises ValueError for files that cannot be used."""
        self._config = config
        self.context = self._new()
        self._stamps = self._stamp()

    def _new(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        config = self._config
        if config.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ValueError(f"--ssl-certfile {config.ssl_certfile}: {_why(error)}") from None
        reqs = _REQS[config.ssl_cert_reqs]
        if reqs != ssl.CERT_NONE and config.ssl_ca_certs is None:
            raise ValueError(f"--ssl-cert-reqs {config.ssl_cert_reqs} needs --ssl-ca-certs")
        if config.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(config.ssl_ca_certs)
            except (OSError, ValueError) as error:
                raise ValueError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_why(error)}") from None
        context.verify_mode = reqs

    async def watch(self) -> None:
        """Read renewed files until cancelled. Files that cannot be used change nothing."""
        while self._config.enable_ssl_refresh:
            await asyncio.sleep(RELOAD_SECONDS)
            if (stamps := self._stamp()) == self._stamps:
                continue
            self._stamps = stamps
            try:
                self._new()  # first into another context: a certificate may have come before its key
                self._load(self.context)
            except ValueError as error:
                logger.error("%s; the files read before stay in use", error)
            else:
                logger.info("read the renewed TLS certificate")

    def _stamp(self) -> list[tuple[int, int] | None]:
        paths = (self._config.ssl_certfile, self._config.ssl_keyfile, self._config.ssl_ca_certs)
        return [_stamp(Path(path)) for path in paths if path is not None]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"the certificate or the key cannot be used ({error.reason or 'no PEM'})"
    return str(getattr(error, "strerror", None) or error)
