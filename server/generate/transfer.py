"""vLLM's `kv_transfer_params`: KV blocks of a prompt that one server computed and another continues.

The first server gets `do_remote_decode` and answers with the location of its blocks; that answer becomes the second
server's `kv_transfer_params`. `remote_block_ids` are block numbers of the prompt, a list for each group of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from quire.configs.config import CacheConfig
from quire.engine.messages import Transfer
from quire.server.errors import BadRequest
from quire.server.request.generation_request import GenerationRequest
from quire.server.values import Json

PARAM = "kv_transfer_params"
MAX_GROUPS, MAX_BLOCKS = 64, 1 << 20
_SWITCHES = ("do_remote_decode", "do_remote_prefill")


def read_transfer(params: dict[str, Json] | None) -> Transfer | None:
    """Read the parameters of a request; return None if it transfers nothing. Without an address (the first server had
    nothing to send), the prompt is computed. Raises BadRequest.
    """
    if not params:
        return None
    send, receive = (params.get(name) or False for name in _SWITCHES)
    for name, value in zip(_SWITCHES, (send, receive)):
        if not isinstance(value, bool):
            raise BadRequest(f"{PARAM}.{name} must be true or false.", param=PARAM)
    host, port, blocks = (params.get(f"remote_{name}") for name in ("host", "port", "block_ids"))
    if not receive or host is None or port is None or not blocks:
        return Transfer(send) if send else None
    if not isinstance(host, str) or not 0 < len(host) <= 255 or not host.isprintable() or set("/ @") & set(host):
        raise BadRequest(f"{PARAM}.remote_host must be a name or an address.", param=PARAM)
    if not _is_number(port, 65535):
        raise BadRequest(f"{PARAM}.remote_port must be a number from 0 to 65535.", param=PARAM)
    return Transfer(send, host, port, _blocks(blocks))


def check_transfer(params: dict[str, Json] | None, config: CacheConfig) -> None:
    """Raise BadRequest for parameters that this server cannot follow."""
    if not params:
        return
    if not config.transfer.role:
        raise BadRequest(f"{PARAM} needs a server with --kv-transfer-config.", param=PARAM)
    host = params.get("remote_host")
    if isinstance(host, str) and params.get("do_remote_prefill") and not config.transfer.allows(host):
        raise BadRequest(
            f"{PARAM}.remote_host: this server reads no blocks from {host[:255]!r}: name it in `allowed_hosts` of "
            "kv_connector_extra_config (--kv-transfer-config).",
            param=PARAM,
        )


def _blocks(value: Json) -> list[list[int]]:
    if isinstance(value, list) and len(value) <= MAX_GROUPS:
        groups = [group for group in value if isinstance(group, list)]
        numbers = [number for group in groups for number in group]
        bounded = len(groups) == len(value) and len(numbers) <= MAX_BLOCKS
        if bounded and all(_is_number(number, MAX_BLOCKS) for number in numbers):
            return groups
    raise BadRequest(
        f"{PARAM}.remote_block_ids must be the lists of numbers that the other server answered.", param=PARAM
    )


def _is_number(value: Json, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def answered(requests: Sequence[GenerationRequest]) -> dict[str, Json] | UnsetType:
    """Return the parameters for the server that continues; only requests of one prompt have them."""
    if len(requests) != 1 or (sent := requests[0].sent) is None:
        return UNSET
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": sent.blocks,
        "remote_engine_id": f"{sent.host}:{sent.port}",
        "remote_request_id": requests[0].request_id,
        "remote_host": sent.host,
        "remote_port": sent.port,
    }
