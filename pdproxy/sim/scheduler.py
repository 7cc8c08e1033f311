"""The engine: a queue, a batch, one step after another.

Each step prefills what has just been admitted and writes one token (or `tokens_per_step`) of every
running choice. When a choice needs a KV block and none is left, the newest running choice ends as
"recomputed", as with vllm-ascend's recompute scheduler.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress

from pdproxy.sim import books as kv
from pdproxy.sim.config import SimConfig
from pdproxy.sim.counters import Counters
from pdproxy.sim.handles import Handles, Pulled
from pdproxy.sim.jobs import Job, PromptRun, Sequence
from pdproxy.sim.model import Generation, prefix_state
from pdproxy.sim.problems import engine_dead, load_failed, queue_full
from pdproxy.sim.requests import GenerateRequest
from pdproxy.sim.transfer import (
    LoadFailure,
    RemoteHandle,
    Transfer,
    handle_params,
    parse_handle,
)

# Without delays: steps per turn of the event loop. Large enough that a token costs little beside
# its bytes, small enough that other connections are served in between.
_STEPS_PER_TURN = 8
_HEARTBEATS_PER_LEASE = 6


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
        self.engine_id = config.engine_id or secrets.token_hex(16)
        self.books = kv.Books(config.num_blocks, config.block_size)
        self.handles = Handles(self.books, config.kv_lease_s)
        self.counters = Counters()
        self.is_dead = False
        self.waiting: deque[Sequence] = deque()
        self.pulling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._fresh: list[Sequence] = []
        self._address = address
        self._transfer = transfer
        self._on_crash = on_crash
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None] | asyncio.Task[Pulled]] = set()

    @property
    def running_count(self) -> int:
        """Choices in execution."""
        return len(self.running) + len(self._fresh)

    @property
    def waiting_count(self) -> int:
        """Choices in the queue or waiting for KV."""
        return len(self.waiting) + len(self.pulling)

    def submit(self, request: GenerateRequest, cut_after: int | None = None) -> Job:
        """Queue a request.

        Raises:
            Problem: The queue is full.
        """
        limit = self.config.max_queued_requests
        if limit is not None and self.waiting_count >= limit:
            self.counters.rejected += 1
            raise queue_full(limit)
        job = Job(request)
        if self.is_dead or not self._accept(job, cut_after):
            job.fail(engine_dead())
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

    def free_handle(self, params: object) -> None:
        """Tell the prefiller that a request refused here will not pull its blocks."""
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            return
        handle = parse_handle(params)
        if handle is not None:
            self._spawn(self._transfer.notify(handle, "release"))

    async def run(self) -> None:
        """Work until cancelled."""
        self._spawn(self._heartbeats())
        try:
            while True:
                self.handles.expire(self._now())
                self._admit()
                if self._fresh or self.running:
                    await self._step()
                else:
                    await self._idle()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, job: Job, cut_after: int | None) -> bool:
        """Make a request's sequences; False if its handle is malformed, which ends vLLM."""
        request = job.request
        handle = parse_handle(request.kv_params or {}) if request.has_handle else None
        now_s = self._now()
        for number, ids in enumerate(request.prompts):
            if request.has_handle and not self._is_usable(handle, len(ids)):
                self._bad_handle()
                return False
            hashes = kv.block_hashes(ids, self.config.block_size, request.cache_salt)
            prompt = PromptRun(ids, hashes, handle)
            for child in range(request.n):
                index = number * request.n + child
                job.sequences.append(
                    Sequence(job, prompt, index, child, now_s, cut_after=cut_after)
                )
        return True

    def _is_usable(self, handle: RemoteHandle | None, tokens: int) -> bool:
        return handle is not None and self.books.blocks_for(tokens) <= len(handle.block_ids)

    def _bad_handle(self) -> None:
        self.counters.bad_handles += 1
        if not self.config.crash_on_bad_handle:
            return
        self.is_dead = True
        everything = (*self.waiting, *self.pulling, *self._fresh, *self.running)
        for job in {sequence.job for sequence in everything}:
            self.abort(job)
            job.fail(engine_dead())
        self._on_crash()

    def _admit(self) -> None:
        """Move requests from the queue into the batch while there is room, first come first."""
        while self.waiting:
            busy = len(self.running) + len(self._fresh) + len(self.pulling)
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
                self.pulling.append(sequence)
                self._spawn(self._pull(sequence, prompt.handle))

    async def _pull(self, sequence: Sequence, handle: RemoteHandle) -> None:
        """Get a sequence's prompt from its prefiller, then let it run."""
        prompt = sequence.prompt
        if prompt.pull is None:
            pulling = self._transfer.pull(handle, len(prompt.ids))
            prompt.pull = asyncio.get_running_loop().create_task(pulling)
            self._tasks.add(prompt.pull)
            prompt.pull.add_done_callback(self._tasks.discard)
        try:
            # Shielded: other choices of the prompt wait for the same pull.
            pulled = await asyncio.shield(prompt.pull)
        except LoadFailure:
            self.counters.failed_transfers += 1
            if sequence.is_done:
                return
            if self.config.load_failure_policy == "fail":
                self.abort(sequence.job)
                sequence.job.fail(load_failed())
                return
            pulled = None
        if sequence.is_done:
            return
        self.pulling.remove(sequence)
        if pulled is None:
            prompt.handle = None
            self._fresh.append(sequence)
        else:
            self._enter(sequence, pulled)
        self._wake.set()

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
        self._count_prompt(sequence, table.cached_tokens, pulled)
        self.running.append(sequence)

    def _count_prompt(self, sequence: Sequence, cached: int, pulled: Pulled | None) -> None:
        counters, job = self.counters, sequence.job
        tokens = len(sequence.prompt.ids)
        counters.prompt_tokens += tokens
        counters.cache_queries += tokens
        counters.cache_hits += cached
        counters.by_source["local_cache_hit"] += cached
        source = "local_compute" if pulled is None else "external_kv_transfer"
        counters.by_source[source] += tokens - cached
        counters.prefill_time.observe(self._now() - sequence.admitted_s)
        if pulled is not None:
            counters.external_queries += tokens - cached
            counters.external_hits += tokens - cached
            counters.wrong_transfers += not pulled.is_valid
            remote = (job.request.kv_params or {}).get("remote_prefill_cached_tokens")
            # Without that key vLLM reports what it did not compute itself: nearly everything.
            cached = remote if isinstance(remote, int) else tokens - 1
        if sequence.child == 0:
            job.cached_tokens += cached

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
            self._pin(sequence, table)
            sequence.table = None
        now_s = self._now()
        self.counters.decode_time.observe(now_s - sequence.first_token_s)
        self.counters.total_time.observe(now_s - sequence.arrived_s)
        self._retire(sequence, reason)

    def _pin(self, sequence: Sequence, table: kv.Table) -> None:
        """Keep the prompt for its decoder; the last choice of the first prompt gives the handle."""
        job, request = sequence.job, sequence.job.request
        number = sequence.index // request.n
        name = request.request_id + (f"-{number}" if request.api == "completions" else "")
        child = f"{sequence.child}_" if request.n > 1 else ""
        handle_id = f"{child}{name}-{secrets.token_hex(4)}"
        state = prefix_state(sequence.prompt.ids)
        tokens = len(sequence.prompt.ids)
        self.handles.pin(handle_id, table, state, tokens, self._now())
        if number == 0 and sequence.child == request.n - 1:
            handle = RemoteHandle(self.engine_id, handle_id, tuple(table.blocks), *self._address)
            job.kv_params = handle_params(handle, tokens, table.cached_tokens)

    def _retire(self, sequence: Sequence, reason: str) -> None:
        """Take a choice out for good and give its blocks back."""
        sequence.is_done = True
        for place in (self.waiting, self.pulling, self._fresh, self.running):
            with suppress(ValueError):
                place.remove(sequence)
        if sequence.table is not None:
            self.books.release(sequence.table)
            sequence.table = None
        self.counters.finished[reason] += 1

    async def _idle(self) -> None:
        """Sleep until there is something to do; pinned blocks may hold up the queue."""
        next_expiry_s = self.handles.next_expiry_s() if self.waiting else None
        timeout_s = None if next_expiry_s is None else max(0.0, next_expiry_s - self._now())
        self._wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)

    async def _heartbeats(self) -> None:
        """Keep the handles of queued requests alive, as vLLM's decoders do."""
        while True:
            await asyncio.sleep(self.config.kv_lease_s / _HEARTBEATS_PER_LEASE)
            handles = {s.prompt.handle for s in self.waiting if s.prompt.handle is not None}
            for handle in handles:
                await self._transfer.notify(handle, "extend")

    def answer_pull(self, body: dict[str, object]) -> Pulled | None:
        """The prefiller's side of a transfer; None if the handle is another engine's."""
        if body.get("engine_id") != self.engine_id:
            return None
        handle_id, blocks = str(body.get("request_id")), body.get("block_ids")
        now_s = self._now()
        nothing = Pulled(0, is_valid=True, tokens=0)
        if body.get("action") == "release":
            self.handles.release(handle_id)
            self._wake.set()
            return nothing
        if body.get("action") == "extend":
            self.handles.extend(handle_id, now_s)
            return nothing
        pulled = self.handles.pull(handle_id, blocks if isinstance(blocks, list) else [], now_s)
        self._wake.set()
        return pulled

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
