import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core import sse
from pdproxy.core.merge import ReplyMerger, StreamMerger
from tests.properties import UNHURRIED

TEXTS = st.text(max_size=6)  # lone surrogates included: json.dumps escapes them


def event(value):
    return sse.encode_data(json.dumps(value).encode())


def events_of(block):
    return [json.loads(sse.data_of(each)) for each in sse.split_block(block)]


def usage(prompt, output, cached=None):
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    details = None if cached is None else {"cached_tokens": cached}
    return {**counts, "prompt_tokens_details": details}


@st.composite
def answers(draw):
    """Texts per choice of each prompt, as (choices per prompt, [[texts of each choice]])."""
    choices, prompts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    each = st.lists(st.lists(TEXTS, max_size=3), min_size=choices, max_size=choices)
    return choices, draw(st.lists(each, min_size=prompts, max_size=prompts))


def stream_of(position, texts):
    """Return the events of one part: all text, the ends, usage and [DONE]."""
    head = {"id": f"cmpl-{position}", "created": position, "model": "m"}
    chunks = [
        {**head, "choices": [{"index": index, "text": text, "finish_reason": None}]}
        for index, pieces in enumerate(texts)
        for text in pieces
    ]
    ends = [{"index": i, "text": "", "finish_reason": "stop"} for i in range(len(texts))]
    chunks.append({**head, "choices": ends})
    chunks.append({**head, "choices": [], "usage": usage(position + 1, 10, position)})
    return [event(chunk) for chunk in chunks] + [sse.DONE]


@UNHURRIED
@given(answers(), st.randoms(use_true_random=False))
def test_streams_in_any_interleaving_make_one(answer, rng):
    choices, prompts = answer
    merger = StreamMerger(choices=choices)
    parts = {position: stream_of(position, texts) for position, texts in enumerate(prompts)}

    merged = b""
    while parts:
        position = rng.choice(list(parts))
        taken = rng.randint(1, len(parts[position]))
        merged += merger.rewrite(position, b"".join(parts[position][:taken]))
        del parts[position][:taken]
        if not parts[position]:
            del parts[position]
    chunks = events_of(merged + merger.ending())

    texts: dict[int, str] = {}
    ends: dict[int, int] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                ends[index] = ends.get(index, 0) + 1
    flat = ["".join(pieces) for prompt in prompts for pieces in prompt]
    assert texts == dict(enumerate(flat))
    assert ends == dict.fromkeys(range(len(flat)), 1)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    count = len(prompts)
    expected = usage(sum(range(1, count + 1)), 10 * count, sum(range(count)))
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == [expected]
    assert chunks[-1]["choices"] == []


@UNHURRIED
@given(answers(), st.randoms(use_true_random=False))
def test_replies_in_any_order_make_one(answer, rng):
    choices, prompts = answer
    merger = ReplyMerger(choices=choices, prompts=len(prompts))
    order = list(range(len(prompts)))
    rng.shuffle(order)

    for position in order:
        listed = [
            {"index": index, "text": "".join(pieces), "finish_reason": "stop", "logprobs": None}
            for index, pieces in enumerate(prompts[position])
        ]
        body = {
            "id": f"cmpl-{position}",
            "object": "text_completion",
            "choices": listed,
            "usage": usage(position + 1, 10, position),
        }
        merger.add(position, json.dumps(body).encode())
    merged = json.loads(merger.merged())

    flat = ["".join(pieces) for prompt in prompts for pieces in prompt]
    assert [choice["index"] for choice in merged["choices"]] == list(range(len(flat)))
    assert [choice["text"] for choice in merged["choices"]] == flat
    assert merged["id"] == "cmpl-0"
    count = len(prompts)
    assert merged["usage"] == usage(sum(range(1, count + 1)), 10 * count, sum(range(count)))


def merged_replies(*bodies, choices=1):
    merger = ReplyMerger(choices=choices, prompts=len(bodies))
    for position, body in enumerate(bodies):
        merger.add(position, body if isinstance(body, bytes) else json.dumps(body).encode())
    return json.loads(merger.merged())


def test_usage_is_not_made_up():
    assert "usage" not in merged_replies({"choices": []}, {"choices": []})
    assert StreamMerger(choices=1).ending() == b""


def test_unknown_counts_of_some_parts_do_not_hide_the_others():
    merged = merged_replies(
        {"choices": [], "usage": usage(1, 2)},
        {"choices": [], "usage": usage(3, 4, 5)},
        {"choices": [], "usage": None},
    )

    assert merged["usage"] == usage(4, 6, 5)


def test_values_of_a_choice_keep_their_spelling():
    body = b'{"choices":[{"index":0,"text":"\\u00e9","logprobs":{"x": 1.50}}]}'
    merger = ReplyMerger(choices=1, prompts=2)
    merger.add(0, body)
    merger.add(1, body)

    expected = b'"text":"\\u00e9","logprobs":{"x": 1.50}}'
    assert merger.merged().count(expected) == 2


@pytest.mark.parametrize(
    "choices", [None, [], {}, "x", [None, 3]], ids=["null", "empty", "object", "text", "odd"]
)
def test_replies_without_choices_merge_to_none(choices):
    assert merged_replies({"choices": choices}, {"id": "x"})["choices"] == []


def test_choices_without_an_index_are_numbered_by_place():
    two = {"choices": [{"text": "a"}, {"text": "b"}]}

    merged = merged_replies(two, two, choices=2)

    assert [choice["index"] for choice in merged["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "data", [b"no json", b'{"choices": null, "x": 1}', b'{"object": "ping"}'], ids=repr
)
def test_events_without_choices_pass(data):
    merged = StreamMerger(choices=2).rewrite(1, sse.encode_data(data))

    assert sse.data_of(merged).replace(b" ", b"") == data.replace(b" ", b"")


def test_usage_in_every_event_stays_in_it():
    merger = StreamMerger(choices=1)
    chunk = {"choices": [{"index": 0, "text": "a"}], "usage": usage(1, 1)}

    assert events_of(merger.rewrite(1, event(chunk)))[0]["usage"] == usage(1, 1)
    assert merger.ending() == b""


def test_nothing_follows_an_error_event():
    merger = StreamMerger(choices=1)
    chunk = event({"choices": [{"index": 0, "text": "a"}]})
    error = event({"error": {"message": "x"}})

    merged = merger.rewrite(0, chunk + error + chunk) + merger.rewrite(1, chunk)

    assert [list(each) for each in events_of(merged)] == [["choices"], ["error"]]
