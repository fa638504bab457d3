"""Which servers' blocks are read."""

from __future__ import annotations

import json

import pytest

from quire.configs.kv_transfer import read_kv_transfer


def read(**extra):
    return read_kv_transfer(json.dumps({"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True), ("10.2.3.4", True),
        ("172.31.0.1", True), ("172.32.0.1", False), ("192.168.1.1", True), ("fd00::5", True), ("100.64.0.9", True),
        ("169.254.169.254", False), ("8.8.8.8", False), ("2001:db8::1", False), ("prefill-0", False), ("", False),
    ],
)  # fmt: skip
def test_private_networks_by_default(host, allowed):
    assert read().allows(host) is allowed


def test_the_hosts_of_the_setting_replace_them():
    settings = read(allowed_hosts=["prefill-0", "8.8.8.0/24", "2001:db8::1"])
    assert all(map(settings.allows, ("prefill-0", "8.8.8.8", "2001:db8::1")))
    assert not any(map(settings.allows, ("prefill-1", "127.0.0.1", "8.8.9.1", "2001:db8::2")))


@pytest.mark.parametrize("value", ["prefill-0", [1], [""], {}])
@pytest.mark.parametrize("key", ["allowed_hosts", "backends"])
def test_wrong_lists_are_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a list"):
        read(**{key: value})


def test_nixl_is_used_if_its_backends_are_named():
    assert read().backends == ()
    assert read(backends=["UCX"]).backends == ("UCX",)
    several = {"connectors": [{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["UCX"]}}]}
    text = json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": several})
    assert read_kv_transfer(text).backends == ("UCX",)
