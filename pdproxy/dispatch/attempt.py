"""The frame of one attempt of a leg: how it ended is told to the observer and to the fleet."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from pdproxy.core.fleet import Lease
from pdproxy.core.retry import is_instance_fault, retry_after_s
from pdproxy.dispatch.tracing import Span
from pdproxy.errors import EngineAnswered, PDProxyError, UpstreamError

if TYPE_CHECKING:
    from pdproxy.dispatch.legs import Tools


class attempt:  # noqa: N801 - a context manager, as a class since generators cost ten times more
    """Run an attempt in a span of its own; tell observer and fleet how it ended."""

    __slots__ = ("_instance", "_span", "_started", "_tools")

    def __init__(self, tools: Tools, lease: Lease, parent: Span) -> None:
        self._tools = tools
        self._instance = instance = lease.instance
        self._started = tools.clock()
        tools.observer.routed(instance.role, lease.reason)
        about = {"server.address": instance.label, "pdproxy.reason": lease.reason}
        self._span = parent.child(instance.role, about)

    def __enter__(self) -> Span:
        return self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, trace)
        tools, instance = self._tools, self._instance
        seconds = tools.clock() - self._started
        if error is None:
            tools.observer.attempt_finished(instance, "success", seconds)
            tools.fleet.report_success(instance)
        elif isinstance(error, PDProxyError):
            tools.observer.attempt_finished(instance, "error", seconds, failure_reason(error))
            self._note_failure(error)
        else:  # the client left: a cancellation, or a broken connection to it
            tools.observer.attempt_finished(instance, "abandoned", seconds)

    def _note_failure(self, error: PDProxyError) -> None:
        tools, instance = self._tools, self._instance
        if is_instance_fault(error):
            certain = isinstance(error, UpstreamError) and error.reason == "connect"
            why = error.detail or error.message
            tools.fleet.report_failure(instance, certain=certain, why=why)
        elif pause_s := retry_after_s(error):
            tools.pauses.note(instance, tools.clock() + pause_s)


def failure_reason(error: PDProxyError) -> str:
    """Return a label value from a closed set."""
    if isinstance(error, EngineAnswered):
        return f"status_{error.engine_status // 100}xx"
    return error.reason if isinstance(error, UpstreamError) else error.code
