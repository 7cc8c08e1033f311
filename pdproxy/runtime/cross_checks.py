"""What is wrong between settings that are right on their own."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint
from pdproxy.core.wording import counted
from pdproxy.runtime.instances_arg import engine_at, expand, is_own_address, share_an_address
from pdproxy.runtime.options import flag_of

if TYPE_CHECKING:
    from pdproxy.runtime.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class CrossFault:
    """A fault that more than one setting has a part in.

    Attributes:
        fields: the settings, the one to name first.
        text: continues "<first option>: ...".
    """

    fields: tuple[str, ...]
    text: str


class Inconsistent(ValueError):  # says what the settings are
    """Carries the faults through pydantic, which collects ValueError only."""

    def __init__(self, faults: tuple[CrossFault, ...]) -> None:
        super().__init__("; ".join(f"{fault.fields[0]}: {fault.text}" for fault in faults))
        self.faults = faults


def cross_faults(settings: Settings) -> Iterator[CrossFault]:
    """Find every fault between the settings."""
    yield from _unpaired("prefiller", settings.prefiller_hosts, settings.prefiller_ports)
    yield from _unpaired("decoder", settings.decoder_hosts, settings.decoder_ports)
    yield from _own_address(settings)
    yield from _metrics_address(settings)
    yield from _not_allowed(settings)
    yield from _own_certificate(settings)
    yield from _engine_certificates(settings)
    if settings.tracing and find_spec("opentelemetry") is None:
        yield CrossFault(("tracing",), "needs what `pip install 'pdproxy[otel]'` installs")


def _unpaired(name: str, hosts: tuple[str, ...], ports: tuple[int, ...]) -> Iterator[CrossFault]:
    fields = (f"{name}_hosts", f"{name}_ports")
    counts = (counted(len(hosts), "host"), counted(len(ports), "port"))
    if len(hosts) == len(ports):
        return
    if not hosts:
        fields, counts = fields[::-1], counts[::-1]
    yield CrossFault(fields, f"{counts[0]}, but {counts[1]} in {flag_of(fields[1])}; one for each")


def _own_address(settings: Settings) -> Iterator[CrossFault]:
    for name in ("prefiller", "decoder"):
        hosts: tuple[str, ...] = getattr(settings, f"{name}_hosts")
        ports: tuple[int, ...] = getattr(settings, f"{name}_ports")
        for number, (host, port) in enumerate(zip(hosts, ports, strict=False), 1):
            pair = (f"{name}_hosts", f"{name}_ports")
            yield from _looped(settings, pair, f"value {number}", engine_at(host, port))
        entries: tuple[str, ...] = getattr(settings, f"{name}s")
        for number, entry in enumerate(entries, 1):
            for endpoint in expand(entry):
                yield from _looped(settings, (f"{name}s",), f"value {number}", endpoint)


def _metrics_address(settings: Settings) -> Iterator[CrossFault]:
    host = settings.metrics_host or settings.host
    if settings.metrics_port == settings.port and share_an_address(settings.host, host):
        text = f"{settings.port} is --port too, on the same address"
        yield CrossFault(("metrics_port", "port", "metrics_host", "host"), text)


def _not_allowed(settings: Settings) -> Iterator[CrossFault]:
    if not settings.instance_allow:
        return
    allow = AllowList(settings.instance_allow)
    for endpoint in (*settings.prefill_endpoints, *settings.decode_endpoints):
        if allow.allows(endpoint.host) is False:
            yield CrossFault(("instance_allow",), f"does not allow the instance {endpoint}")


def _looped(
    settings: Settings, fields: tuple[str, ...], where: str, endpoint: Endpoint
) -> Iterator[CrossFault]:
    if is_own_address(endpoint, settings.host, settings.port):
        text = f"{where} ('{endpoint}') is the address that the proxy itself listens on"
        yield CrossFault((*fields, "host", "port"), text)


def _own_certificate(settings: Settings) -> Iterator[CrossFault]:
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None and key is None:
        return
    fields = ("ssl_certfile", "ssl_keyfile")
    if certificate is None:
        yield CrossFault(fields[::-1], "needs --ssl-certfile too")
        return
    if key is None:
        yield CrossFault(fields, "needs --ssl-keyfile too")
        return
    try:
        # Without a password of ours, a key that needs one would ask the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        yield CrossFault(fields, f"cannot be used with --ssl-keyfile: {_reason(error)}")


def _engine_certificates(settings: Settings) -> Iterator[CrossFault]:
    if settings.engine_ca_file is None:
        return
    fields = ("engine_ca_file", "engine_insecure")
    if settings.engine_insecure:
        yield CrossFault(fields, "contradicts --engine-insecure, which checks no certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(settings.engine_ca_file)
    except (OSError, ValueError) as error:
        yield CrossFault(fields[:1], f"holds no certificates in PEM form: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
