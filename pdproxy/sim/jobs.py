"""What the scheduler keeps of a request: its prompts, its choices, and the way to the answer."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pdproxy.sim.books import Table, block_hashes
from pdproxy.sim.handles import Pulled
from pdproxy.sim.model import Generation, Step
from pdproxy.sim.problems import Problem
from pdproxy.sim.requests import GenerateRequest
from pdproxy.sim.transfer import RemoteHandle, parse_handle


@dataclass(slots=True, eq=False)
class PromptRun:
    """One prompt of a request; its KV is pulled once for all its choices."""

    ids: list[int]
    hashes: list[bytes]
    handle: RemoteHandle | None
    pull: asyncio.Task[Pulled] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: waiting, then holding blocks, then done.

    Attributes:
        index: The choice's index in the answer.
        child: Which of the prompt's `n` choices.
        cut_after: End as recomputed after so many tokens; a test asked for it.
    """

    job: "Job"
    prompt: PromptRun
    index: int
    child: int
    arrived_s: float
    table: Table | None = None
    generation: Generation | None = None
    cut_after: int | None = None
    is_done: bool = False
    admitted_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine; the handler reads its steps, the scheduler writes them.

    Attributes:
        cached_tokens: Prompt tokens that needed no computing, of all prompts.
        kv_params: The handle for the decoder, once the prefill has ended.
        problem: Set if the engine gave up the request.
        has_bad_handle: The handle is malformed or has too few blocks, which ends vLLM.
    """

    request: GenerateRequest
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    kv_params: dict[str, object] | None = None
    problem: Problem | None = None
    has_bad_handle: bool = False
    _steps: deque[tuple[int, Step]] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        """Whether no more steps will come."""
        return self.problem is not None or all(s.is_done for s in self.sequences)

    def put(self, index: int, step: Step) -> None:
        """Hand over a step of one choice."""
        self._steps.append((index, step))
        self._wake.set()

    def fail(self, problem: Problem) -> None:
        """End the request with an error."""
        self.problem = problem
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, Step]]]:
        """All steps made since the last look, until the request is done.

        Raises:
            Problem: The engine gave up the request.
        """
        while True:
            if self._steps:
                batch = list(self._steps)
                self._steps.clear()
                yield batch
                continue
            if self.problem is not None:
                raise self.problem
            if self.is_done:
                return
            self._wake.clear()
            await self._wake.wait()


def make_job(request: GenerateRequest, block_size: int, now_s: float, cut_after: int | None) -> Job:
    """A request's prompts and choices, ready to be queued."""
    job = Job(request)
    handle = parse_handle(request.kv_params or {}) if request.has_handle else None
    for number, ids in enumerate(request.prompts):
        if request.has_handle and (handle is None or len(handle.block_ids) * block_size < len(ids)):
            job.has_bad_handle = True
        hashes = block_hashes(ids, block_size, request.cache_salt)
        prompt = PromptRun(ids, hashes, handle)
        for child in range(request.n):
            index = number * request.n + child
            sequence = Sequence(job, prompt, index, child, now_s, cut_after=cut_after)
            job.sequences.append(sequence)
    return job
