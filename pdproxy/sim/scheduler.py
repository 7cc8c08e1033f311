"""The engine: a queue, a batch, one step after another.

Each step prefills what has just been admitted and writes one token (or `tokens_per_step`) of every
running choice. When a choice needs a KV block and none is left, the newest running choice ends as
"recomputed", as with vllm-ascend's recompute scheduler.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from pdproxy.sim import books as kv
from pdproxy.sim.config import SimConfig
from pdproxy.sim.counters import Counters
from pdproxy.sim.fetching import Fetcher
from pdproxy.sim.handles import Handles, Pulled
from pdproxy.sim.handover import Handover
from pdproxy.sim.jobs import Job, Sequence, make_job
from pdproxy.sim.model import Generation, prefix_state
from pdproxy.sim.problems import engine_dead, load_failed, queue_full
from pdproxy.sim.requests import GenerateRequest
from pdproxy.sim.transfer import Transfer

# Without delays: steps per turn of the event loop. Large enough that a token costs little beside
# its bytes, small enough that other connections are served in between.
_STEPS_PER_TURN = 8


class Engine:
    """One engine's scheduler.

    Args:
        config: Sizes and delays.
        address: Host and port at which decoders reach this engine.
        transfer: The way to other engines.
        on_crash: Called once when a bad handle ends the engine.
    """

    def __init__(
        self,
        config: SimConfig,
        address: tuple[str, int],
        transfer: Transfer,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.books = kv.Books(config.num_blocks, config.block_size)
        self.handles = Handles(self.books, config.kv_lease_s)
        engine_id = config.engine_id or secrets.token_hex(16)
        self.handover = Handover(engine_id, address, self.handles)
        self.counters = Counters()
        self.is_dead = False
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._fresh: list[Sequence] = []
        self.fetcher = Fetcher(config, transfer, self._arrived)
        self._on_crash = on_crash
        self._wake = asyncio.Event()

    @property
    def running_count(self) -> int:
        """Choices in execution."""
        return len(self.running) + len(self._fresh)

    @property
    def waiting_count(self) -> int:
        """Choices in the queue or waiting for KV."""
        return len(self.waiting) + len(self.fetcher.pulling)

    def submit(self, request: GenerateRequest, cut_after: int | None = None) -> Job:
        """Queue a request.

        Raises:
            Problem: The queue is full.
        """
        limit = self.config.max_queued_requests
        if limit is not None and self.waiting_count >= limit:
            self.counters.rejected += 1
            raise queue_full(limit)
        job = make_job(request, self.config.block_size, self._now(), cut_after)
        if self.is_dead or job.has_bad_handle:
            job.fail(engine_dead())
            self._count_bad_handle(job)
            return job
        self.waiting.extend(job.sequences)
        self._wake.set()
        return job

    def abort(self, job: Job) -> None:
        """Take a request out, wherever it is; does nothing if it is done."""
        for sequence in job.sequences:
            if not sequence.is_done:
                self._retire(sequence, "abort")
        self._wake.set()

    def answer_pull(self, body: Mapping[str, object]) -> Pulled | None:
        """Serve a decoder; freed blocks may let the queue move."""
        pulled = self.handover.answer(body, self._now())
        self._wake.set()
        return pulled

    async def run(self) -> None:
        """Work until cancelled."""
        self.fetcher.keep_alive(lambda: self.waiting)
        try:
            while True:
                self.handles.expire(self._now())
                self._admit()
                if self._fresh or self.running:
                    await self._step()
                else:
                    await self._idle()
        finally:
            await self.fetcher.close()

    def _count_bad_handle(self, job: Job) -> None:
        """A malformed handle ends the engine, if it is to be as fragile as a real one."""
        self.counters.bad_handles += job.has_bad_handle
        if self.is_dead or not self.config.crash_on_bad_handle:
            return
        self.is_dead = True
        everything = (*self.waiting, *self.fetcher.pulling, *self._fresh, *self.running)
        for other in {sequence.job for sequence in everything}:
            self.abort(other)
            other.fail(engine_dead())
        self._on_crash()

    def _admit(self) -> None:
        """Move requests from the queue into the batch while there is room, first come first."""
        while self.waiting:
            busy = self.running_count + len(self.fetcher.pulling)
            if busy >= self.config.max_num_seqs:
                return
            sequence = self.waiting[0]
            prompt = sequence.prompt
            table = self.books.allocate(prompt.hashes, len(prompt.ids))
            if table is None:
                return
            self.waiting.popleft()
            sequence.table = table
            sequence.admitted_s = self._now()
            self.counters.queue_time.observe(sequence.admitted_s - sequence.arrived_s)
            if prompt.handle is None:
                self._fresh.append(sequence)
            else:
                self.fetcher.start(sequence, prompt.handle)

    def _arrived(self, sequence: Sequence, pulled: Pulled | None) -> None:
        """A pull has ended; without KV the request fails, or its prompt is computed here."""
        self._wake.set()
        if pulled is not None:
            self._enter(sequence, pulled)
            return
        self.counters.failed_transfers += 1
        if self.config.load_failure_policy == "fail":
            self.abort(sequence.job)
            sequence.job.fail(load_failed())
        else:
            self._fresh.append(sequence)

    async def _step(self) -> None:
        """One engine step, or several in one turn of the loop if a step takes no time."""
        delay_s = self._step_time_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        fresh, self._fresh = self._fresh, []
        for sequence in fresh:
            self._enter(sequence, None)
        for _ in range(1 if delay_s else _STEPS_PER_TURN):
            for sequence in tuple(self.running):
                if not sequence.is_done:
                    self._advance(sequence)
            if not self.running:
                break
        if not delay_s:
            await asyncio.sleep(0)

    def _step_time_s(self) -> float:
        config = self.config
        delay_s = 0.0
        if self._fresh:
            uncached = sum(
                len(s.prompt.ids) - s.table.cached_tokens for s in self._fresh if s.table
            )
            delay_s += config.prefill_base_s + config.prefill_per_token_s * uncached
        if self.running:
            delay_s += config.decode_base_s + config.decode_per_request_s * len(self.running)
        return delay_s

    def _enter(self, sequence: Sequence, pulled: Pulled | None) -> None:
        """The prompt's KV is here: count where it came from and start to write."""
        request, prompt, table = sequence.job.request, sequence.prompt, sequence.table
        assert table is not None, "an admitted sequence holds blocks"
        self.books.publish(table, prompt.hashes)
        state = prefix_state(prompt.ids) if pulled is None else pulled.state
        sequence.generation = Generation(
            prompt.ids, state, request.sampling, index=sequence.child, grammar=request.grammar
        )
        waited_s = self._now() - sequence.admitted_s
        tokens, cached = len(prompt.ids), table.cached_tokens
        is_valid = None if pulled is None else pulled.is_valid
        self.counters.count_prompt(tokens, cached, is_valid, waited_s)
        if pulled is not None:
            remote = (request.kv_params or {}).get("remote_prefill_cached_tokens")
            # Without that key vLLM reports what it did not compute itself: nearly everything.
            cached = remote if isinstance(remote, int) else tokens - 1
        if sequence.child == 0:
            sequence.job.cached_tokens += cached
        self.running.append(sequence)

    def _advance(self, sequence: Sequence) -> None:
        """Write the next tokens of one choice; without a block for them, the newest must go."""
        generation, table = sequence.generation, sequence.table
        assert generation is not None, "a running sequence has one"
        assert table is not None, "a running sequence holds blocks"
        written = len(generation.output)
        count = self.config.tokens_per_step
        if sequence.cut_after is not None:
            count = min(count, sequence.cut_after - written)
            if count <= 0:
                self._cut(sequence)
                return
        needed = len(generation.prompt) + written + count - 1
        while not self.books.grow(table, needed):
            newest = self.running[-1]
            self._cut(newest)
            if newest is sequence:
                return
        step = generation.advance(count)
        self.counters.generation_tokens += len(step.tokens)
        if not written:
            sequence.first_token_s = self._now()
            self.counters.first_token_time.observe(sequence.first_token_s - sequence.arrived_s)
        if step.finish_reason is not None:
            self._finish(sequence, step.finish_reason)
        sequence.job.put(sequence.index, step)

    def _cut(self, sequence: Sequence) -> None:
        """End a choice as recomputed."""
        assert sequence.generation is not None, "a running sequence has one"
        self.counters.preemptions += 1
        step = sequence.generation.cut()
        self._retire(sequence, "stop")
        sequence.job.put(sequence.index, step)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """A choice is complete: cache its blocks, and pin the prompt if a decoder will come."""
        job, prompt, table = sequence.job, sequence.prompt, sequence.table
        generation = sequence.generation
        assert generation is not None, "a running sequence has one"
        assert table is not None, "a running sequence holds blocks"
        computed = [*prompt.ids, *generation.output[:-1]]
        salt = job.request.cache_salt
        hashes = kv.block_hashes(computed, self.config.block_size, salt, prompt.hashes)
        self.books.publish(table, hashes)
        if job.request.wants_handle:
            self.handover.pin(sequence, self._now())
        now_s = self._now()
        self.counters.decode_time.observe(now_s - sequence.first_token_s)
        self.counters.total_time.observe(now_s - sequence.arrived_s)
        self._retire(sequence, reason)

    def _retire(self, sequence: Sequence, reason: str) -> None:
        """Take a choice out for good and give its blocks back."""
        sequence.is_done = True
        for place in (self.waiting, self.fetcher.pulling, self._fresh, self.running):
            with suppress(ValueError):
                place.remove(sequence)
        if sequence.table is not None:
            self.books.release(sequence.table)
            sequence.table = None
        self.counters.finished[reason] += 1

    async def _idle(self) -> None:
        """Sleep until there is something to do; a lease that ends gives its blocks back."""
        next_expiry_s = self.handles.next_expiry_s()
        timeout_s = None if next_expiry_s is None else max(0.0, next_expiry_s - self._now())
        self._wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
