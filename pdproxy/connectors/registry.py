"""The connectors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdproxy.connectors.base import Connector
from pdproxy.connectors.pull import PullConnector

CONNECTORS: Mapping[str, Callable[[], Connector]] = MappingProxyType(
    {PullConnector.name: PullConnector}
)
