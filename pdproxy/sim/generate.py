"""Answers /v1/chat/completions and /v1/completions, whole or as a stream."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from aiohttp import web

from pdproxy.sim import chat_wire, completion_wire, messages_api, responses_api, scaleout_api, wire
from pdproxy.sim.config import SimConfig
from pdproxy.sim.faults import Fault, asked_for
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.node import NODE, Node, json_response, read_body
from pdproxy.sim.parsing import parse_chat, parse_completion
from pdproxy.sim.problems import Problem, bad_request, injected, load_failed
from pdproxy.sim.requests import GenerateRequest

SSE_TYPE = "text/event-stream; charset=utf-8"

Parse = Callable[[Mapping[str, object], str | None, SimConfig], GenerateRequest]
Whole = Callable[[Job, list[list[Step]], SimConfig], bytes]


class Stream(Protocol):
    """Writes the events of one answer."""

    def opening(self) -> bytes:
        """What comes before the first step."""
        ...

    def step(self, index: int, step: Step) -> bytes:
        """The event of one step of one choice."""
        ...

    def closing(self) -> bytes:
        """What comes after the last step."""
        ...


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await answer(request, parse_chat, chat_wire.ChatStream, chat_wire.whole)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    stream = completion_wire.CompletionStream
    return await answer(request, parse_completion, stream, completion_wire.whole)


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    api = responses_api
    return await answer(request, api.parse, api.ResponsesStream, api.whole)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    return await answer(
        request, messages_api.parse, messages_api.MessagesStream, messages_api.whole
    )


async def tokens(request: web.Request) -> web.StreamResponse:
    """POST /inference/v1/generate."""
    api = scaleout_api
    # Nothing of it is streamed, so the stream is never made.
    return await answer(request, api.parse, chat_wire.ChatStream, api.whole)


async def answer(
    request: web.Request,
    parse: Parse,
    stream: Callable[[Job, SimConfig], Stream],
    whole: Whole,
) -> web.StreamResponse:
    """Run a generation request through the engine and answer it in one API's form."""
    node = request.app[NODE]
    node.in_flight += 1
    try:
        parsed = await _parsed(request, node, parse)
        # Not for what is refused anyway, such as a request that only releases its handle.
        fault = asked_for(node.faults.take(), request.headers, node.config.role)
        if fault.status is not None or fault.drop_after == 0:
            return _refuse(request, node, fault)
        job = node.engine.submit(parsed, fault.recompute_after)
        try:
            if parsed.stream:
                return await _stream(request, job, stream(job, node.config), fault)
            steps = await _collect(job)
            headers = _load_header(request, node)
            return json_response(whole(job, steps, node.config), headers=headers)
        finally:
            node.engine.abort(job)
    finally:
        node.in_flight -= 1


async def _parsed(request: web.Request, node: Node, parse: Parse) -> GenerateRequest:
    """The checked request; if it is refused after parsing, its handle is freed, as in vLLM."""
    body = await read_body(request)
    try:
        _check_rank(request)
        return parse(body, request.headers.get("X-Request-Id"), node.config)
    except Problem as problem:
        if problem.kind == "BadRequestError":
            node.engine.fetcher.free(body.get("kv_transfer_params"))
        raise


def _check_rank(request: web.Request) -> None:
    """There is one data-parallel rank; a header that is no number is ignored."""
    rank = request.headers.get("X-data-parallel-rank", "0")
    if rank.isdigit() and int(rank) > 0:
        raise bad_request(f"data_parallel_rank {rank} is out of range [0, 1).")


def _refuse(request: web.Request, node: Node, fault: Fault) -> web.Response:
    """The failure that a test asked for, before anything is done."""
    if fault.status is None:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    after_s = node.faults.retry_after_s
    headers = None if after_s is None else {"Retry-After": str(after_s)}
    return json_response(injected(fault.status).to_json(), status=fault.status, headers=headers)


async def _collect(job: Job) -> list[list[Step]]:
    """All steps of a job, by choice."""
    steps: list[list[Step]] = [[] for _ in job.sequences]
    async for batch in job.batches():
        for index, step in batch:
            steps[index].append(step)
    return steps


async def _stream(
    request: web.Request, job: Job, stream: Stream, fault: Fault
) -> web.StreamResponse:
    """Send an answer as it is made; a failure of the engine becomes an error event."""
    response = web.StreamResponse(headers={"Content-Type": SSE_TYPE})
    await response.prepare(request)
    with suppress(ConnectionResetError):
        if fault == Fault() or fault == Fault(recompute_after=fault.recompute_after):
            await _relay(response, job, stream)
        else:
            await _relay_until_fault(request, response, job, stream, fault)
        await response.write_eof()
    return response


async def _relay(response: web.StreamResponse, job: Job, stream: Stream) -> None:
    """Write every batch of steps at once; each step is its own event."""
    opening = stream.opening()
    try:
        async for batch in job.batches():
            events = [stream.step(index, step) for index, step in batch]
            await response.write(opening + b"".join(events))
            opening = b""
    except Problem as problem:
        await response.write(opening + problem.to_event() + wire.DONE)
        return
    await response.write(stream.closing())


async def _relay_until_fault(
    request: web.Request,
    response: web.StreamResponse,
    job: Job,
    stream: Stream,
    fault: Fault,
) -> None:
    """Write event by event, the role included, up to the place where things go wrong."""
    limits = (fault.drop_after, fault.stall_after, fault.error_after)
    left = min(limit for limit in limits if limit is not None)
    opening = stream.opening()
    if opening:
        await response.write(opening)
        left -= 1
    async for batch in job.batches():
        for index, step in batch:
            if left <= 0:
                await _break(request, response, fault)
                return
            await response.write(stream.step(index, step))
            left -= 1
    await response.write(stream.closing())


async def _break(request: web.Request, response: web.StreamResponse, fault: Fault) -> None:
    if fault.error_after is not None:
        await response.write(load_failed().to_event() + wire.DONE)
        return
    if fault.stall_after is not None:
        # Ends when the client leaves: the handler is cancelled then.
        await asyncio.Event().wait()
    if request.transport is not None:
        request.transport.abort()


def _load_header(request: web.Request, node: Node) -> dict[str, str]:
    """The load report that a request can ask for with a header."""
    wanted = request.headers.get("endpoint-load-metrics-format", "").upper()
    waiting, usage = float(node.engine.waiting_count), node.engine.books.usage
    if wanted == "JSON":
        text = f'{{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}'
        return {"endpoint-load-metrics": f'JSON {{"named_metrics": {text}}}'}
    if wanted == "TEXT":
        name = "named_metrics"
        text = f"{name}.num_requests_waiting={waiting}, {name}.kv_cache_usage_perc={usage}"
        return {"endpoint-load-metrics": f"TEXT {text}"}
    return {}
