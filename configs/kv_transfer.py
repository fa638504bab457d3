"""Parses `--kv-transfer-config`, which is vLLM's JSON."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, replace
from typing import Any

GIB = 1 << 30
ROLES = ("kv_producer", "kv_consumer", "kv_both")
# vLLM's connectors by purpose; all that move blocks between servers use one transport here
_TRANSFER = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector")
_TRANSFER += ("P2pNcclConnector",)
_STORES = ("LMCacheConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector")
_OFFLOADING, _MULTI = "OffloadingConnector", "MultiConnector"
# keys of vLLM that configure its own transports
_IGNORED = {"engine_id", "kv_buffer_device", "kv_rank", "kv_parallel_size", "kv_connector_module_path"}
_IGNORED |= {"enable_permute_local_kv", "kv_load_failure_policy"}
# servers that a request may name: this machine, private networks, and carriers' networks, which clusters use
PRIVATE = (
    "localhost", "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
)  # fmt: skip
_KEYS = {"kv_connector", "kv_role", "kv_ip", "kv_port", "kv_buffer_size", "kv_connector_extra_config"}


@dataclass(frozen=True, slots=True)
class KVTransferSettings:
    """Settings for sending KV blocks to other servers and reading theirs, and the tiers that connectors ask for."""

    role: str = ""  # one of ROLES; "": blocks stay on this server
    host: str = "127.0.0.1"
    port: int = 5600
    buffer_bytes: int = 1_000_000_000  # maximum size of blocks that wait for consumers, per engine
    offload_gib: float | None = None
    folder: str | None = None
    allowed_hosts: tuple[str, ...] = PRIVATE  # names, addresses and networks whose blocks are read
    backends: tuple[str, ...] = ()  # NIXL's backends, such as UCX; (): NIXL is not used
    notes: tuple[str, ...] = ()  # keys without effect, with the reason

    @property
    def sends(self) -> bool:
        return self.role in ("kv_producer", "kv_both")

    def allows(self, host: str) -> bool:
        """Return whether blocks may come from `host`. The block of a strange server could be wrong for all requests
        with the same prefix, and connections to any address would show what listens there.
        """
        if host in self.allowed_hosts:
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return any(address in network for network in map(_network, self.allowed_hosts) if network is not None)

    @property
    def receives(self) -> bool:
        return self.role in ("kv_consumer", "kv_both")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network or the address that `text` is; None for a name."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def read_kv_transfer(text: str) -> KVTransferSettings:
    """Read the JSON object `text`. Raises ValueError naming the key and its values."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    return _read(values)


def _read(values: dict[str, Any]) -> KVTransferSettings:
    if unknown := sorted(values.keys() - _KEYS - _IGNORED):
        raise ValueError(f"unknown key {', '.join(unknown)}; the keys are {', '.join(sorted(_KEYS | _IGNORED))}")
    values = {key: value for key, value in values.items() if value is not None}
    connector, role = values.get("kv_connector"), values.get("kv_role", "kv_both")
    extra = values.get("kv_connector_extra_config", {})
    if role not in ROLES:
        raise ValueError(f"kv_role is {json.dumps(role)}, but must be one of {', '.join(ROLES)}")
    if not isinstance(extra, dict):
        raise ValueError("kv_connector_extra_config must be a JSON object")
    if connector in _TRANSFER:
        hosts = _texts(extra, "allowed_hosts", "names, addresses or networks")
        backends = _texts(extra, "backends", "names of NIXL's backends") or ()
        allowed = PRIVATE if hosts is None else hosts
        return KVTransferSettings(role, **_address(values), allowed_hosts=allowed, backends=backends)
    if connector == _OFFLOADING:
        return _offloading(extra)
    if connector in _STORES:
        why = "--kv-offload-gib and --kv-disk keep blocks that leave the KV cache"
        return KVTransferSettings(notes=(f"kv_connector {connector}: no effect: {why}",))
    if connector == _MULTI:
        return _several(extra)
    known = sorted((*_TRANSFER, *_STORES, _OFFLOADING, _MULTI))
    raise ValueError(f"kv_connector is {json.dumps(connector)}, but must be one of {', '.join(known)}")


def _texts(extra: dict[str, Any], key: str, what: str) -> tuple[str, ...] | None:
    found = extra.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"kv_connector_extra_config.{key} must be a list of {what}")
    return tuple(found)


def _address(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name, types in (
        ("kv_ip", "host", str), ("kv_port", "port", (int, str)), ("kv_buffer_size", "buffer_bytes", (int, float))
    ):  # fmt: skip
        if (value := values.get(key)) is None:
            continue
        if not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{key} is {json.dumps(value)}, but must be a {'text' if types is str else 'number'}")
        found[name] = value
    if "port" in found:
        found["port"] = _whole("kv_port", found["port"], 1, 65535)
    if "buffer_bytes" in found:
        found["buffer_bytes"] = _whole("kv_buffer_size", found["buffer_bytes"], 1, 1 << 50)
    return found


def _whole(key: str, value: Any, least: int, most: int) -> int:
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{key} is {json.dumps(value)}, but must be from {least} to {most}")
    return number


def _offloading(extra: dict[str, Any]) -> KVTransferSettings:
    """Return vLLM's tiers: `cpu_bytes_to_use` of RAM, and the first folder of `secondary_tiers`."""
    size = extra.get("cpu_bytes_to_use", extra.get("cpu_bytes_to_use_per_rank"))
    gib = None if size is None else _whole("cpu_bytes_to_use", size, 0, 1 << 50) / GIB
    folder, notes = None, []
    for tier in extra.get("secondary_tiers", []):
        root = tier.get("root_dir") if isinstance(tier, dict) else None
        if isinstance(root, str) and folder is None:
            folder = root
        else:
            notes.append(f"secondary_tiers: {json.dumps(tier)}: no effect: there is one folder, --kv-disk")
    return KVTransferSettings(offload_gib=gib, folder=folder, notes=tuple(notes))


def _several(extra: dict[str, Any]) -> KVTransferSettings:
    """Return the connectors of a MultiConnector, each of which may set what the others leave."""
    connectors = extra.get("connectors")
    if not isinstance(connectors, list) or not all(isinstance(one, dict) for one in connectors):
        raise ValueError("MultiConnector: kv_connector_extra_config.connectors must be a list of JSON objects")
    merged = KVTransferSettings()
    for one in map(_read, connectors):
        if one.role:
            merged = replace(merged, role=one.role, host=one.host, port=one.port, buffer_bytes=one.buffer_bytes)
            merged = replace(merged, allowed_hosts=one.allowed_hosts, backends=one.backends)
        gib, folder = one.offload_gib, one.folder
        merged = replace(
            merged,
            offload_gib=merged.offload_gib if gib is None else gib,
            folder=merged.folder or folder,
            notes=merged.notes + one.notes,
        )
    return merged
