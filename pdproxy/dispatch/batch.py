"""A list of prompts: one prefill and decode for each, one answer for all.

Rule: a KV handle belongs to one prompt. Engines return one handle for a whole list and apply it
to every prompt, with wrong text or a dead decoder as the result (vLLM 0.32, seen on engines).
"""

from __future__ import annotations

import asyncio
import re

from pdproxy.core import sse
from pdproxy.core.api import GenerateRequest
from pdproxy.core.merge import ReplyMerger, StreamMerger
from pdproxy.dispatch.generate import Exchange
from pdproxy.dispatch.legs import Call, Tools
from pdproxy.dispatch.ports import Downstream, Headers
from pdproxy.dispatch.rounds import Rounds
from pdproxy.errors import PDProxyError

PRIORITY_HEADER = "x-vllm-priority"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


async def answer(
    tools: Tools, request: GenerateRequest, call: Call, downstream: Downstream
) -> None:
    """Answer a generate request, whatever number of prompts it holds.

    Raises:
        PDProxyError: it could not be answered; `downstream.is_committed` says how much the
            client has seen.
    """
    call.visit = tools.admission.admitted(_priority(request, call), call.account.timeline)
    async with call.visit:
        if not request.prompts or request.is_decode_only:
            await _one_prompt(tools, request, call, downstream)
        else:
            await _Batch(tools, request, call, downstream).run()


def _priority(request: GenerateRequest, call: Call) -> int:
    """Return the priority: the header wins over the body, as in vLLM; what is no number is 0."""
    for name, value in call.headers:
        if name == PRIORITY_HEADER:
            return int(value) if _INTEGER.fullmatch(value) else request.priority
    return request.priority


async def _one_prompt(
    tools: Tools, request: GenerateRequest, call: Call, downstream: Downstream
) -> None:
    if tools.rules.recompute:
        await Rounds(tools, request, call, downstream).run()
    else:
        await Exchange(tools, request, call, downstream).run()


class _Batch:
    """The prompts of one request, some at a time, merged into one answer."""

    def __init__(
        self, tools: Tools, request: GenerateRequest, call: Call, downstream: Downstream
    ) -> None:
        self._tools = tools
        self._request = request
        self._call = call
        self._gate = asyncio.Semaphore(tools.rules.max_parallel_prompts)
        self._joint = _Joint(request, downstream)

    async def run(self) -> None:
        """Answer all prompts; the first failure ends the others."""
        self._call.account.timeline.is_joint = len(self._request.prompts) > 1
        try:
            async with asyncio.TaskGroup() as group:
                for position, single in enumerate(self._request.singles()):
                    group.create_task(self._one(position, single))
        except* PDProxyError as failures:
            raise _first(failures) from None
        await self._joint.finish()

    async def _one(self, position: int, single: GenerateRequest) -> None:
        part = _Part(self._joint, position)
        await self._gate.acquire()
        await _one_prompt(self._tools, single, self._call, part)
        # Not after a failure: it would let one more prompt start before the group is ended.
        self._gate.release()


class _Joint:
    """What the parts share: the client, the head sent once, the merged numbers."""

    def __init__(self, request: GenerateRequest, downstream: Downstream) -> None:
        self.downstream = downstream
        self.streams = StreamMerger(choices=request.choices)
        self._replies = ReplyMerger(choices=request.choices, prompts=len(request.prompts))
        self._headers: Headers = ()
        self._starting = asyncio.Lock()

    async def start(self, headers: Headers) -> None:
        async with self._starting:
            if not self.downstream.is_committed:
                await self.downstream.start(headers)

    def add_reply(self, position: int, headers: Headers, body: bytes) -> None:
        self._headers = headers
        self._replies.add(position, body)

    async def finish(self) -> None:
        if self.downstream.is_committed:
            self.downstream.write(self.streams.ending() + sse.DONE)
            return
        await self.downstream.respond(200, self._headers, self._replies.merged())


class _Part:
    """The way back of one prompt's answer: a Downstream whose client is the joint answer."""

    def __init__(self, joint: _Joint, position: int) -> None:
        self._joint = joint
        self._position = position
        self._is_committed = False

    @property
    def is_committed(self) -> bool:
        """Whether this part has output at the client; until then it may be tried again."""
        return self._is_committed

    @property
    def is_congested(self) -> bool:
        return self._joint.downstream.is_congested

    async def start(self, headers: Headers) -> None:
        self._is_committed = True
        await self._joint.start(headers)

    def write(self, block: bytes) -> None:
        merged = self._joint.streams.rewrite(self._position, block)
        if merged:
            self._joint.downstream.write(merged)

    async def drain(self) -> None:
        await self._joint.downstream.drain()

    async def respond(self, _status: int, headers: Headers, body: bytes) -> None:
        self._joint.add_reply(self._position, headers, body)


def _first(failures: BaseExceptionGroup[PDProxyError]) -> PDProxyError:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PDProxyError)
    return error
