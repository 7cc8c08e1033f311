"""The relay alone: bytes go in by the socket's callbacks, events come out at the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from pdproxy.core import sse
from pdproxy.core.answer import Answer
from pdproxy.core.keeper import Keeper
from pdproxy.core.pulse import FULL, Pulse
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.relay import StreamRelay
from pdproxy.errors import (
    EngineAnswered,
    RecomputeUnsupported,
    UpstreamLost,
    UpstreamProtocol,
    UpstreamTimeout,
)
from pdproxy.upstream.response import Response
from tests.dispatch.stage import FakeDownstream
from tests.fakes.answer import event_bytes
from tests.fakes.behaviours import DONE


@dataclass(slots=True)
class FakeLink:
    """The connection's end of a response: notes what the relay asks of it."""

    asked: list[str] = field(default_factory=list)

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def cut(self) -> None:
        self.asked.append("cut")

    def cancel(self) -> None:
        self.asked.append("cancel")


class Rig:
    """A relay with its response; the test is the decoder."""

    def __init__(self, **options: Any) -> None:
        self.link = FakeLink()
        loop = asyncio.get_running_loop()
        self.response = Response(self.link, loop.create_future(), 1 << 20)
        self.pulse = Pulse(Timeline(0.0))
        self.full = 0
        self.now = 0.0
        given: dict[str, Any] = {
            "choices": 1,
            "cached_tokens": None,
            "stops": frozenset(),
            "max_event_bytes": 1 << 20,
        }
        self.relay = StreamRelay(
            self.response,
            **{**given, **options},
            pulse=self.pulse,
            clock=lambda: self.now,
            on_full=self._full,
        )
        self.response.pipe(self.relay)
        self.downstream = FakeDownstream()

    def _full(self) -> None:
        self.full += 1

    def send(self, data: bytes) -> None:
        self.response.sink.body_received(data)

    def end(self) -> None:
        self.response.end()

    @property
    def is_open(self) -> bool:
        """Whether output may go to the client."""
        return self.relay._is_open

    async def open(self) -> None:
        async with asyncio.timeout(5):
            await self.relay.opening()
        await self.downstream.start([])
        self.relay.attach(self.downstream)

    async def finish(self) -> None:
        async with asyncio.timeout(5):
            await self.relay.finished()
        self.downstream.is_over = True

    async def play(self, *pieces: bytes) -> bytes:
        """Relay a whole stream; return what the client got."""
        for piece in pieces:
            self.send(piece)
        self.end()
        await self.open()
        await self.finish()
        return b"".join(self.downstream.blocks)

    async def play_live(self, opening: bytes, *pieces: bytes) -> bytes:
        """The same, but with the client attached as soon as there is output."""
        self.send(opening)
        await self.open()
        for piece in pieces:
            self.send(piece)
        self.end()
        await self.finish()
        return b"".join(self.downstream.blocks)


def chunk(
    text: str | None = None, *, index: int = 0, finish: str | None = None, **more: Any
) -> bytes:
    delta: dict[str, Any] = {} if text is None else {"content": text}
    return event_bytes(
        {"choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]}
    )


def usage(cached: int | None = None, **more: Any) -> bytes:
    counts = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    details = None if cached is None else {"cached_tokens": cached}
    return event_bytes({"choices": [], "usage": {**counts, "prompt_tokens_details": details}})


ROLE = event_bytes({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
A, B, END = chunk("a"), chunk("b\u00e9"), chunk(finish="stop")
STREAM = ROLE + A + B + END + usage() + DONE
RECOMPUTED = chunk(finish="stop", stop_reason="recomputed")
ERROR = event_bytes({"error": {"message": "KV load failed", "code": 500}})


# --- what passes


@pytest.mark.case("C15")
async def test_bytes_come_out_as_they_went_in_however_they_were_cut():
    for cut in range(1, len(STREAM)):
        assert await Rig().play(STREAM[:cut], STREAM[cut:]) == STREAM


async def test_single_bytes_make_whole_events():
    rig = Rig()

    got = await rig.play_live(ROLE + A, *(bytes([byte]) for byte in STREAM[len(ROLE + A) :]))

    assert got == STREAM
    assert all(block.endswith(b"\n\n") for block in rig.downstream.blocks)


@pytest.mark.case("C17", "C18", "C19")
@pytest.mark.parametrize(
    "spelled",
    [
        pytest.param(STREAM.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(STREAM.replace(b"\n", b"\r"), id="cr"),
        pytest.param(b": ping\n\n" + STREAM.replace(b"\n\n", b"\n\n: ping\n\n"), id="comments"),
        pytest.param(b"\xef\xbb\xbf" + STREAM, id="byte-order-mark"),
    ],
)
async def test_other_spellings_of_a_stream_come_out_as_the_usual_one(spelled):
    assert await Rig().play(spelled) == STREAM


async def test_a_read_that_needs_no_look_is_written_as_it_came():
    rig = Rig()
    read = A + B

    await rig.play_live(ROLE + A, read, END + DONE)

    assert rig.downstream.blocks[1] is read


async def test_facts_of_the_stream_are_kept():
    rig = Rig(choices=2)

    await rig.play(A, END, chunk("x", index=1, finish="length"), usage(), DONE)

    facts = rig.relay.facts
    assert facts.finished == {0: "stop", 1: "length"}
    assert facts.usage is not None
    assert facts.usage.completion_tokens == 2
    assert facts.is_done


@pytest.mark.case("C14")
async def test_cached_tokens_are_the_prefillers():
    rig = Rig(cached_tokens=3)

    await rig.play(A, END, usage(8), DONE)

    details = rig.downstream.events[2]["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 3}


async def test_internal_fields_do_not_reach_the_client():
    leak = event_bytes(
        {"choices": [{"index": 0, "delta": {"content": "c"}}], "kv_transfer_params": {"a": 1}}
    )
    rig = Rig()

    await rig.play_live(A, leak, END + DONE)

    assert [list(event) for event in rig.downstream.events[:-1]] == [["choices"]] * 3


# --- before the first output


@pytest.mark.case("C71")
async def test_nothing_is_released_before_the_decoder_generates():
    rig = Rig()
    for piece in (b": ping\n\n", ROLE, event_bytes({"choices": []}), event_bytes({"x": 1})):
        rig.send(piece)
        assert not rig.is_open
    rig.send(A)
    assert rig.is_open

    await rig.open()

    assert rig.downstream.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert rig.pulse.noted == 0  # one event of content, which follows none


async def test_every_content_event_is_a_beat_at_the_moment_it_is_written():
    rig = Rig()
    rig.send(ROLE + A)  # held until the client is attached
    rig.now = 3.0
    await rig.open()
    for rig.now, data in ((4.0, A), (6.0, A + A), (7.0, END), (8.0, usage() + DONE)):
        rig.send(data)
    rig.end()
    await rig.finish()

    assert rig.pulse.noted == 3
    assert rig.pulse.sum_s == 3.0


async def test_long_stream_asks_to_be_counted_while_it_runs():
    rig = Rig()
    rig.send(A)
    await rig.open()
    rig.send(A * FULL)

    assert rig.full == 1


@pytest.mark.parametrize("keeper", [True, False])
async def test_beats_are_the_same_whether_the_answer_is_kept_or_not(keeper):
    kept = Keeper(Answer(), shows_ids=True) if keeper else None
    rig = Rig(keeper=kept)

    await rig.play_live(ROLE + A, A, A + A, END + DONE)

    assert rig.pulse.noted == 3


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(A, id="content"),
        pytest.param(event_bytes({"choices": [{"index": 0, "text": "x"}]}), id="text"),
        pytest.param(event_bytes({"choices": [{"index": 0, "delta": {}}]}), id="empty-delta"),
        pytest.param(END, id="finish"),
        pytest.param(
            event_bytes({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]}), id="reasoning"
        ),
    ],
)
async def test_a_sign_of_generation_opens_the_stream(event):
    rig = Rig()
    rig.send(ROLE)
    rig.send(event)

    assert rig.is_open


async def test_engine_error_after_the_role_is_no_output():
    rig = Rig()
    rig.send(ROLE)
    rig.send(ERROR + DONE)

    with pytest.raises(EngineAnswered) as caught:
        await rig.open()

    assert caught.value.engine_status == 500
    assert orjson.loads(caught.value.body)["error"]["message"] == "KV load failed"
    assert rig.downstream.blocks == []


@pytest.mark.parametrize("pieces", [[], [ROLE], [ROLE + A[:-9]]], ids=["empty", "role", "cut"])
async def test_end_before_output_is_a_loss(pieces):
    rig = Rig()
    for piece in pieces:
        rig.send(piece)
    rig.end()

    with pytest.raises(UpstreamLost):
        await rig.open()


async def test_failure_before_output_is_raised_as_it_is():
    rig = Rig()
    rig.send(ROLE)
    error = UpstreamTimeout("x", phase="body")
    rig.response.head_arrived.set_result(None)
    rig.response.fail(error)

    with pytest.raises(UpstreamTimeout) as caught:
        await rig.open()

    assert caught.value is error


async def test_what_is_held_before_output_is_bounded():
    rig = Rig(max_event_bytes=1000)
    for _ in range(100):
        rig.send(event_bytes({"choices": [], "ping": "x" * 50}))

    with pytest.raises(UpstreamProtocol):
        await rig.open()

    assert len(rig.relay._held) < 1200


@pytest.mark.parametrize("is_open", [False, True], ids=["before-output", "after-output"])
async def test_event_over_the_limit_fails_the_stream(is_open):
    rig = Rig(max_event_bytes=1000)
    if is_open:
        rig.send(A)
        await rig.open()
    rig.send(b"data: " + b"x" * 2000)

    with pytest.raises(UpstreamProtocol):
        await (rig.finish() if is_open else rig.open())


# --- the end


@pytest.mark.parametrize("is_live", [False, True], ids=["at-once", "live"])
@pytest.mark.parametrize("is_done_sent", [False, True], ids=["without-done", "with-done"])
async def test_every_good_stream_ends_in_one_done(is_live, is_done_sent):
    rig = Rig()
    rest = (B, END) + ((DONE,) if is_done_sent else ())

    got = await (rig.play_live(A, *rest) if is_live else rig.play(A, *rest))

    assert got == A + B + END + DONE


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"\r", b": bye"])
async def test_untidy_end_of_a_whole_stream_is_no_failure(tail):
    assert await Rig().play_live(A, END, tail) == A + END + DONE


async def test_nothing_follows_done():
    rig = Rig()

    assert await rig.play_live(A, END + DONE + B, B, DONE) == A + END + DONE


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([B], id="no-finish"),
        pytest.param([B, DONE], id="done-without-finish"),
        pytest.param([END[:-5]], id="cut-finish"),
        pytest.param([END[:-1]], id="finish-without-blank-line"),
        pytest.param([usage()], id="usage-only"),
    ],
)
async def test_early_end_is_a_loss_and_not_a_success(pieces):
    rig = Rig()

    with pytest.raises(UpstreamLost):
        await rig.play_live(A, *pieces)

    assert "[DONE]" not in rig.downstream.events


async def test_stream_is_complete_when_every_choice_is():
    with pytest.raises(UpstreamLost):
        await Rig(choices=2).play(A, END, DONE)

    both = A + END + chunk("x", index=1, finish="stop") + DONE
    assert await Rig(choices=2).play(both) == both


@pytest.mark.parametrize("last", [END + DONE, ERROR], ids=["done", "error-event"])
async def test_failure_after_the_streams_own_end_is_none(last):
    rig = Rig()
    rig.send(A)
    await rig.open()
    rig.send(last)
    rig.response.head_arrived.set_result(None)
    rig.response.fail(UpstreamLost("x"))

    await rig.finish()

    assert b"".join(rig.downstream.blocks) == A + last


async def test_failure_in_the_middle_is_raised():
    rig = Rig()
    rig.send(A)
    await rig.open()
    rig.send(END)
    rig.response.head_arrived.set_result(None)
    rig.response.fail(UpstreamLost("x"))

    with pytest.raises(UpstreamLost):
        await rig.finish()


async def test_engines_error_event_after_output_reaches_the_client_once():
    rig = Rig()

    assert await rig.play_live(A, ERROR, DONE) == A + ERROR + DONE

    assert rig.relay.facts.error is not None


async def test_callbacks_after_the_end_change_nothing():
    rig = Rig()
    await rig.play_live(A, END, DONE)

    rig.relay.body_received(B)
    rig.relay.body_ended()
    rig.relay.body_failed(UpstreamLost("x"))

    assert rig.downstream.blocks[-1] == DONE


# --- recompute


@pytest.mark.case("C40")
@pytest.mark.parametrize("is_live", [False, True], ids=["at-once", "live"])
@pytest.mark.parametrize(
    "marker",
    [
        pytest.param(RECOMPUTED, id="empty"),
        pytest.param(chunk("z", finish="stop", stop_reason="recomputed"), id="with-text"),
        pytest.param(chunk(finish="length", stop_reason="recomputed"), id="other-finish"),
        pytest.param(B + RECOMPUTED, id="behind-another-event"),
    ],
)
async def test_recompute_is_an_error_and_never_leaks(is_live, marker):
    rig = Rig()
    rest = (marker, usage(), DONE)

    with pytest.raises(RecomputeUnsupported):
        await (rig.play_live(ROLE + A, *rest) if is_live else rig.play(ROLE + A, *rest))

    sent = b"".join(rig.downstream.blocks)
    assert b"recomputed" not in sent
    assert b"[DONE]" not in sent
    assert b'"stop"' not in sent


@pytest.mark.case("C29")
async def test_other_choices_run_to_their_end():
    rig = Rig(choices=2)
    other = chunk("x", index=1) + chunk("y", index=1, finish="stop")

    with pytest.raises(RecomputeUnsupported):
        await rig.play_live(A, RECOMPUTED, other, DONE)

    texts = [event["choices"][0]["delta"].get("content") for event in rig.downstream.events]
    assert texts == ["a", "x", "y"]


@pytest.mark.case("C40")
async def test_users_own_stop_string_is_an_ordinary_stop():
    stream = A + RECOMPUTED + DONE

    assert await Rig(stops=frozenset({"recomputed"})).play(stream) == stream


# --- a slow client


async def test_congestion_pauses_the_decoder_until_the_client_caught_up():
    rig = Rig()
    rig.send(A)
    await rig.open()
    finishing = asyncio.get_running_loop().create_task(rig.finish())
    await asyncio.sleep(0)

    rig.downstream.is_congested = True
    rig.send(B)
    assert rig.link.asked == ["pause"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert rig.link.asked == ["pause", "resume"]
    assert rig.downstream.drains == 1
    rig.send(END + DONE)
    rig.end()
    await finishing
    assert b"".join(rig.downstream.blocks) == A + B + END + DONE


async def test_congestion_by_what_was_held_pauses_as_well():
    rig = Rig()
    rig.send(A)
    rig.downstream.is_congested = True
    await rig.open()

    finishing = asyncio.get_running_loop().create_task(rig.finish())
    await asyncio.sleep(0)
    rig.send(END + DONE)
    rig.end()
    await finishing

    assert rig.link.asked == ["pause", "resume"]


async def test_last_read_may_find_the_client_congested():
    rig = Rig()
    rig.send(A)
    await rig.open()
    rig.downstream.is_congested = True
    rig.send(END + DONE)
    rig.end()

    await rig.finish()

    assert rig.downstream.events[-1] == "[DONE]"


def test_test_streams_are_as_the_splitter_leaves_them():
    splitter = sse.EventSplitter()

    assert splitter.feed(STREAM) == STREAM
