"""The charts of fleets start quire in vLLM's place: each start is followed, and what has no effect warns once."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from quire.configs.kv_transfer import read_kv_transfer
from tests.configs.test_peer_flags import start  # noqa: F401

STARTS = yaml.safe_load((Path(__file__).parent / "fleet_starts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", STARTS)
def test_a_chart_starts_quire(start, monkeypatch, name):  # noqa: F811
    case = STARTS[name]
    for variable, value in case.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    found = start(*shlex.split(case["args"]))
    assert not isinstance(found, str), found
    config, warnings = found
    values = {
        field: getattr(section, field)
        for section in (config.model, config.server, config.cache, config.parallel, config.scheduler, config.lora)
        for field in section.__dataclass_fields__
    }
    assert {key: values[key] for key in case["settings"]} == case["settings"]
    expected = case.get("warnings", [])
    assert len(warnings) == len(expected), warnings
    for one in expected:
        assert sum(one in warning for warning in warnings) == 1, (one, warnings)
    assert "secret" not in str(warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object"),
        ('{"kv_connector": "NixlConnector", "kv_rol": "kv_both"}', "unknown key kv_rol"),
        ('{"kv_connector": "Other"}', 'kv_connector is "Other", but must be one of LMCacheConnector'),
        ('{"kv_connector": "NixlConnector", "kv_role": "both"}', "one of kv_producer, kv_consumer, kv_both"),
        ('{"kv_connector": "NixlConnector", "kv_port": 70000}', "kv_port is 70000, but must be from 1 to 65535"),
        ('{"kv_connector": "NixlConnector", "kv_port": "x"}', "kv_port"),
        ('{"kv_connector": "NixlConnector", "kv_ip": 5}', "kv_ip is 5, but must be a text"),
        ('{"kv_connector": "NixlConnector", "kv_buffer_size": 0}', "kv_buffer_size"),
        ('{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": 5}', "must be a JSON object"),
        ('{"kv_connector": "MultiConnector"}', "connectors must be a list"),
    ],
)
def test_bad_transfers_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_kv_transfer(text)


def test_several_connectors():
    found = read_kv_transfer(
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": ['
        '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_port": "5700"}, '
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"cpu_bytes_to_use": 2147483648, "secondary_tiers": ['
        '{"type": "fs", "root_dir": "/a"}, {"type": "obj"}]}}, '
        '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]}}'
    )
    assert (found.role, found.port, found.offload_gib, found.folder) == ("kv_producer", 5700, 2.0, "/a")
    assert found.sends and not found.receives and len(found.notes) == 2
