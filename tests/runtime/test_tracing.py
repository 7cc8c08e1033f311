"""Spans of requests, rounds and legs, and the trace context that engines get."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pdproxy.errors import ConfigError
from pdproxy.runtime import cross_checks
from pdproxy.runtime.otel import RequestTracer
from pdproxy.runtime.sources import load_settings
from pdproxy.server.app import build_app
from tests.cases.scene import chat, scene
from tests.fakes import behaviours
from tests.fakes.client import get, post
from tests.fakes.waiting import until
from tests.server.stage import listening, server

PATH = "/v1/chat/completions"
ASKED = {"model": "toy", "prompt": "il y a un mot", "max_tokens": 6}
BODY = {"model": "toy", "messages": [{"role": "user", "content": "PROMPT-XYZ"}], "max_tokens": 4}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MINE = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "mine=1")]


class Traced:
    """An application over fake engines whose spans are kept."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RequestTracer(provider)
        self.port = 0
        self.play: Any = None

    @property
    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    @property
    def names(self) -> list[str]:
        """Return the names in the order in which the spans began."""
        spans = sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        return [span.name for span in spans]


@asynccontextmanager
async def application(**options):
    traced = Traced()
    async with server(**options) as made:
        context = dataclasses.replace(made.context, tracer=traced.tracer)
        async with listening(build_app(context)) as traced.port:
            traced.play = made.play
            yield traced


def context_of(engine):
    _, trace, span, flags = engine.only_call.headers["traceparent"].split("-")
    assert int(flags, 16) & 1, "the engine shall sample what is sampled here"
    return int(trace, 16), int(span, 16)


async def test_request_has_a_span_with_a_round_and_two_legs_inside():
    async with application() as traced:
        await post(traced.port, PATH, BODY)
        await until(lambda: len(traced.spans) == 4)

        spans = traced.spans
        assert traced.names == [f"POST {PATH}", "round", "prefill", "decode"]
        request, round_ = spans[f"POST {PATH}"], spans["round"]
        assert request.kind is SpanKind.SERVER
        assert round_.parent.span_id == request.context.span_id
        for name in ("prefill", "decode"):
            assert spans[name].parent.span_id == round_.context.span_id
        assert spans["decode"].attributes["server.address"] == traced.play.d[0].address
        assert request.attributes["pdproxy.outcome"] == "success"
        assert request.attributes["gen_ai.usage.output_tokens"] == 4
        assert request.attributes["http.response.status_code"] == 200


async def test_each_leg_hands_its_own_span_on_within_the_clients_trace():
    async with application() as traced:
        await post(traced.port, PATH, BODY, MINE)
        await until(lambda: len(traced.spans) == 4)

        spans = traced.spans
        request = spans[f"POST {PATH}"]
        assert (request.context.trace_id, request.parent.span_id) == (
            int(TRACE, 16),
            int(PARENT, 16),
        )
        for name, engine in (("prefill", traced.play.p[0]), ("decode", traced.play.d[0])):
            assert context_of(engine) == (int(TRACE, 16), spans[name].context.span_id)
            assert engine.only_call.headers["tracestate"] == "mine=1"


async def test_client_without_a_trace_begins_one():
    async with application() as traced:
        await post(traced.port, PATH, BODY)
        await until(lambda: len(traced.spans) == 4)

        traces = {context_of(engine)[0] for engine in (traced.play.p[0], traced.play.d[0])}
        assert traces == {traced.spans["decode"].context.trace_id}


async def test_request_that_passes_through_is_traced_too():
    async with application() as traced:
        await get(traced.port, "/v1/anything", MINE)
        await until(lambda: len(traced.spans) == 2)

        assert traced.names == ["GET passthrough", "decode"]
        assert context_of(traced.play.d[0])[1] == traced.spans["decode"].context.span_id


@pytest.mark.case("C90")
async def test_failure_is_marked_and_told_without_what_was_asked():
    quoting = behaviours.error(400, body=behaviours.error_body("cannot parse PROMPT-XYZ"))
    async with application(p=[quoting]) as traced:
        await post(traced.port, PATH, BODY, [("Authorization", "Bearer KEY-XYZ")])
        await until(lambda: len(traced.spans) == 3)

        spans = traced.spans
        for name in ("prefill", "round", f"POST {PATH}"):
            assert spans[name].status.status_code is StatusCode.ERROR
        assert spans[f"POST {PATH}"].attributes["error.type"] == "engine_error"
        told = "".join(span.to_json() for span in spans.values())
        assert "XYZ" not in told


async def test_every_round_has_its_span():
    cut = behaviours.one_after_another(behaviours.recompute(2), behaviours.decode)
    async with application(d=[cut], recompute=True, max_rounds=3) as traced:
        await post(traced.port, "/v1/completions", {**ASKED, "stream": True})
        await until(lambda: "POST /v1/completions" in traced.spans)

        assert traced.names[1:] == ["round", "prefill", "decode"] * 2


async def test_without_tracing_the_clients_context_passes_as_it_is():
    async with server() as made, listening(build_app(made.context)) as port:
        await post(port, PATH, BODY, MINE)

        for engine in (made.play.p[0], made.play.d[0]):
            assert engine.only_call.headers["traceparent"] == MINE[0][1]


def test_without_tracing_nothing_of_it_is_imported():
    code = (
        "import sys, pdproxy.cli, pdproxy.runtime.worker\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_extra_is_told_at_the_start(monkeypatch):
    monkeypatch.setattr(cross_checks, "find_spec", lambda _name: None)

    with pytest.raises(ConfigError, match=r"--tracing.*pdproxy\[otel\]"):
        load_settings(["--tracing"], {})


@asynccontextmanager
async def collector():
    """An OTLP collector; yields its address and the names of the spans it got, by service."""
    found: dict[str, list[str]] = {}

    async def take(request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest()
        message.ParseFromString(await request.read())
        for resource in message.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                spans = [span.name for span in scope.spans]
                found.setdefault(names["service.name"], []).extend(spans)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with listening(app) as port:
        yield f"http://127.0.0.1:{port}", found


@pytest.mark.e2e
@pytest.mark.parametrize("service", ["pdproxy", "mine"])
async def test_spans_go_to_the_collector_that_the_standard_variables_name(service):
    async with collector() as (address, found):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": address}
        if service != "pdproxy":
            env["OTEL_SERVICE_NAME"] = service
        async with scene([None], [None], "--tracing", process=True, env=env) as stage:
            await stage.post(PATH, chat(max_tokens=2))

    assert sorted(found) == [service]
    assert sorted(found[service]) == [f"POST {PATH}", "decode", "prefill", "round"]
