"""The part of the metrics that a reader may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from quire.server.request.sink import ALL, View

if TYPE_CHECKING:
    from quire.server.keys.key import Key


def view_for(key: Key | None, has_keys: bool, is_alone: bool) -> View:
    """Return what a request with this key sees: everything without keys, for administrators and for keys with
    `metrics`; the key's own series for others. All requests are those of a key that `is_alone`, the only one for
    clients, so it also sees what counts them together.
    """
    if not has_keys or (key is not None and (key.admin or key.metrics)):
        return ALL
    return View("" if key is None else key.name, is_alone)


def render(registry: CollectorRegistry, view: View) -> bytes:
    """Return the metrics of a registry in Prometheus' text format."""
    return generate_latest(registry if view == ALL else cast(CollectorRegistry, _Seen(registry, view)))


class _Seen:
    """A registry of which a view sees a part."""

    def __init__(self, registry: CollectorRegistry, view: View):
        self.registry, self.view = registry, view

    def collect(self) -> Iterator[Any]:
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if self._is_visible(sample.labels)]
            if family.samples:
                yield family

    def _is_visible(self, labels: dict[str, str]) -> bool:
        if "key" not in labels:
            return self.view.shared
        return self.view.key in (None, labels["key"])
