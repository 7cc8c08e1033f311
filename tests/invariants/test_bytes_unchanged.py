"""Invariant 4: decoder bytes reach the client unchanged and in order unless a rule says so."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.dispatch.test_relay import Rig
from tests.fakes.behaviours import DONE
from tests.properties import UNHURRIED

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
EXTRAS = st.dictionaries(
    st.sampled_from(["x", "logprobs", "service_tier", "token_ids"]),
    st.none() | st.integers(0, 2**63) | TEXTS | st.lists(st.integers(0, 9), max_size=3),
    max_size=2,
)


@st.composite
def streams(draw):
    """A good stream of one choice, as events; in JSON of either spelling."""
    option = draw(st.sampled_from([0, orjson.OPT_INDENT_2]))

    def event(choice):
        chunk = {**draw(EXTRAS), "choices": [{"index": 0, **choice}]}
        text = orjson.dumps(chunk, option=option).replace(b"\n", b" ")
        return b"data: " + text + b"\n\n"

    texts = draw(st.lists(TEXTS, max_size=5))
    events = [event({"delta": {"role": "assistant", "content": ""}})]
    events += [event({"delta": {"content": text}, "finish_reason": None}) for text in texts]
    events.append(event({"delta": {}, "finish_reason": "stop"}))
    return [*events, DONE]


@UNHURRIED
@given(events=streams(), cuts=st.lists(st.integers(0, 2000), max_size=6), is_live=st.booleans())
def test_every_byte_arrives_in_order(events, cuts, is_live):
    stream = b"".join(events)
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [stream[a:b] for a, b in pairwise(edges)]

    async def play() -> bytes:
        rig = Rig()
        if is_live and is_output(events[1]):
            rest = b"".join(events[2:])
            parts = (rest[at : at + 7] for at in range(0, len(rest), 7))
            return await rig.play_live(b"".join(events[:2]), *parts)
        return await rig.play(*pieces)

    assert asyncio.run(play()) == stream


def is_output(event: bytes) -> bool:
    """Whether an event is output, so that the client may be attached behind it."""
    return bool(orjson.loads(event[6:])["choices"][0]["delta"].get("content"))
