"""A fake engine: a socket server whose every answer, down to bytes and timing, is the test's.

It records what it gets (`requests`), keeps the books of the KV handles it gave out (`held`), and
answers generate calls by `behaviour`, an async function of (request, answer). A handle is good for
one pull: a decoder that is given a used or unknown one says STALE.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from types import EllipsisType
from typing import Any, Self
from weakref import WeakValueDictionary

from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour, Role
from tests.fakes.waiting import until
from tests.fakes.wire import PeerGone, Wire

# Decoders find the prefiller of a handle by the engine id in it, as real ones do over the network.
_ENGINES: WeakValueDictionary[str, FakeEngine] = WeakValueDictionary()


class FakeEngine:
    """One engine on a loopback port: `async with FakeEngine("decode") as d1`.

    Attributes:
        requests: all requests, in order of arrival.
        behaviour: how generate calls are answered; exchange it at any time.
        routes: answers by path, looked at before anything else.
        open_answers: answers begun and not ended.
        connections: connections accepted so far.
        token_delay_s: pause before each token of the default decoder.
        natural_tokens: tokens of an answer without a limit.
        cached_tokens: what usage reports; an ellipsis leaves the details out altogether.
    """

    def __init__(
        self,
        role: Role,
        behaviour: Behaviour | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.role = role
        self.host = host
        self.port = port
        self.behaviour: Behaviour = behaviour or behaviours.default_for(role)
        self.routes: dict[str, Behaviour] = {}
        self.requests: list[EngineRequest] = []
        self.open_answers = 0
        self.connections = 0
        self.model = "toy"
        self.token_delay_s = 0.0
        self.natural_tokens = 6
        self.cached_tokens: int | EllipsisType | None = None
        self.engine_id = f"engine-{uuid.uuid4()}"
        self._handles: dict[str, bool] = {}
        self._wires: set[Wire] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    # --- life

    async def __aenter__(self) -> Self:
        _ENGINES[self.engine_id] = self
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self.host, self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: refuse connections and reset the ones that are open."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for wire in list(self._wires):
            wire.reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    # --- what the test looks at

    @property
    def calls(self) -> list[EngineRequest]:
        """The requests that are no health or model look-ups and release no handle."""
        return [
            call
            for call in self.requests
            if call.path not in behaviours.SERVICE_PATHS and not call.is_release
        ]

    @property
    def releases(self) -> list[EngineRequest]:
        """The requests that were only to release a handle."""
        return [call for call in self.requests if call.is_release]

    @property
    def only_call(self) -> EngineRequest:
        assert len(self.calls) == 1, [call.path for call in self.calls]
        return self.calls[0]

    @property
    def held(self) -> int:
        """How many handles this prefiller gave out and no decoder is done with."""
        return len(self._handles)

    async def wait_for_calls(self, count: int, within_s: float = 10.0) -> None:
        await until(lambda: len(self.calls) >= count, within_s)

    # --- KV handles

    def new_handle(self) -> dict[str, Any]:
        """Return fresh kv_transfer_params and hold their blocks."""
        request_id = f"kv-{uuid.uuid4()}"
        self._handles[request_id] = False
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_block_ids": [[len(self._handles), 7, 8]],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_request_id": request_id,
        }

    def drop_handles(self) -> None:
        """Forget all blocks, as an engine does that restarts or whose lease ran out."""
        self._handles.clear()

    def pull(self, request_id: str) -> bool:
        """Use a handle and say whether it was good."""
        if self._handles.get(request_id) is not False:
            return False
        self._handles[request_id] = True
        return True

    def let_go(self, request_id: str) -> None:
        self._handles.pop(request_id, None)

    # --- the server

    def _accept(self) -> Wire:
        wire = Wire()
        self.connections += 1
        self._wires.add(wire)
        self._run(self._converse(wire, self.connections))
        return wire

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, wire: Wire, number: int) -> None:
        try:
            await wire.connected.wait()
            while await self._exchange(wire, number):
                pass
        except PeerGone:
            pass
        finally:
            self._wires.discard(wire)
            wire.close()

    async def _exchange(self, wire: Wire, number: int) -> bool:
        """Serve one request; return whether another may follow on this connection."""
        request = await self._read_request(wire, number)
        self.requests.append(request)
        answer = Answer(wire)
        self.open_answers += 1
        try:
            await _unless_gone(self._answer(request, answer), wire)
        except PeerGone:
            request.closed_early = not answer.left
            raise
        finally:
            self.open_answers -= 1
            request.finished.set()
        return not (answer.left or wire.gone.is_set())

    async def _read_request(self, wire: Wire, number: int) -> EngineRequest:
        head = (await wire.read_until(b"\r\n\r\n")).decode("latin-1")
        at_s = asyncio.get_running_loop().time()
        line, *rest = head[:-4].split("\r\n")
        method, target, _ = line.split(" ")
        path, _, query = target.partition("?")
        pairs = [header.partition(":") for header in rest]
        headers = [(name, value.strip()) for name, _, value in pairs]
        lower = {name.lower(): value for name, value in headers}
        if lower.get("expect", "").lower() == "100-continue":
            await wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await wire.read_body(lower)
        return EngineRequest(self, method, path, query, headers, body, at_s, number)

    async def _answer(self, request: EngineRequest, answer: Answer) -> None:
        if (route := self.routes.get(request.path)) is not None:
            await route(request, answer)
        elif request.path in behaviours.SERVICE_PATHS:
            await behaviours.service_answer(request, answer)
        elif request.is_release:
            await self._release(request, answer)
        elif request.path in behaviours.GENERATE_PATHS and request.method == "POST":
            await self._generate(request, answer)
        else:
            await answer.json({"detail": "Not Found"}, 404)

    async def _release(self, request: EngineRequest, answer: Answer) -> None:
        """Refuse a decode after reading it, which frees the handle's blocks, as in vLLM."""
        handle = _handle_of(request)
        if (source := _ENGINES.get(str(handle.get("remote_engine_id")))) is not None:
            source.let_go(str(handle.get("remote_request_id")))
        await answer.json(behaviours.error_body("max_tokens is too large"), 400)

    async def _generate(self, request: EngineRequest, answer: Answer) -> None:
        if self.role == "decode" and (handle := _handle_of(request)):
            source = _ENGINES.get(str(handle.get("remote_engine_id")))
            request_id = str(handle.get("remote_request_id"))
            request.stale = source is None or not source.pull(request_id)
            try:
                await self.behaviour(request, answer)
            finally:
                if source is not None:
                    source.let_go(request_id)
            return
        await self.behaviour(request, answer)


def _handle_of(request: EngineRequest) -> dict[str, Any]:
    try:
        handle = request.json.get("kv_transfer_params")
    except (ValueError, AssertionError):
        return {}
    return handle if isinstance(handle, dict) and handle.get("remote_engine_id") else {}


async def _unless_gone(answering: Coroutine[Any, Any, None], wire: Wire) -> None:
    """Run a behaviour, and stop it when the peer leaves.

    Raises:
        PeerGone: it left before the behaviour came to its end.
    """
    loop = asyncio.get_running_loop()
    work = loop.create_task(answering)
    gone = loop.create_task(wire.gone.wait())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        # One turn for a behaviour that has written everything and is about to return.
        await asyncio.sleep(0)
        if not work.done():
            raise PeerGone
        work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
