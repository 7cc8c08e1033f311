import itertools
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.sse import (
    DONE,
    EventSplitter,
    EventTooLarge,
    data_of,
    encode_data,
    split_block,
    with_data,
)

CAPTURES = sorted((Path(__file__).parent / "captures").glob("*.sse"))
captures = pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
BOM = b"\xef\xbb\xbf"

# Six events with what makes streams hard: text of 2, 3 and 4 bytes a character, a recompute.
TEXTS = ["é", "你好", "🙂", ""]
SIX_EVENTS = b"".join(
    encode_data(b'{"choices":[{"index":0,"text":"' + text.encode() + b'"}]}') for text in TEXTS
) + (
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop","stop_reason":"recomputed"}]}'
    b"\n\n" + DONE
)


def feed_all(pieces, splitter=None):
    splitter = splitter or EventSplitter()
    return b"".join(splitter.feed(piece) for piece in pieces)


def cut(stream, positions):
    """Return the pieces of `stream` between the given positions."""
    edges = [0, *sorted(position % (len(stream) + 1) for position in positions), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def expected_events(stream):
    """Read a whole stream as the HTML standard says, line by line, for comparison."""
    *lines, _unfinished = re.split(rb"\r\n|\r|\n", stream.removeprefix(BOM))
    events = []
    fields = []
    for line in lines:
        if line:
            fields.append(line)
            continue
        kept = [field for field in fields if not field.startswith(b":")]
        if any(field.split(b":")[0] == b"data" for field in kept):
            events.append(b"".join(field + b"\n" for field in kept) + b"\n")
        fields = []
    return events


# --- what passes unchanged


@captures
def test_real_streams_leave_byte_for_byte(path):
    stream = path.read_bytes()

    assert feed_all([stream]) == stream


@captures
def test_a_read_of_whole_events_is_returned_as_the_same_object(path):
    splitter = EventSplitter()
    splitter.feed(CHUNK)
    stream = path.read_bytes()

    for read in [*split_block(stream), stream]:
        assert splitter.feed(read) is read
    assert splitter.pending == b""


@pytest.mark.case("C17")
@pytest.mark.parametrize(
    "line",
    [b'data:{"a":1}', b'data:  {"a":1}', b'data:\t{"a":1}', b"data:", b"data", b"data: \xff\xfe"],
)
def test_data_lines_are_never_rewritten(line):
    assert feed_all([line + b"\n\n"]) == line + b"\n\n"


def test_other_fields_stay_with_their_event():
    event = b"event: error\nid: 7\nretry: 100\ndata: x\ndata: y\nwhatever: z\n\n"

    assert feed_all([CHUNK, event]) == CHUNK + event


# --- cuts


@pytest.mark.case("C15", "C16")
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_a_cut_at_any_byte_changes_nothing(ending):
    stream = SIX_EVENTS.replace(b"\n", ending)

    for position in range(len(stream) + 1):
        assert feed_all([stream[:position], stream[position:]]) == SIX_EVENTS


@captures
def test_real_streams_survive_byte_by_byte(path):
    stream = path.read_bytes()

    pieces = [stream[i : i + 1] for i in range(len(stream))]

    assert feed_all(pieces) == stream


@captures
def test_only_whole_events_leave(path):
    stream = path.read_bytes()
    splitter = EventSplitter()
    events = split_block(stream)

    for piece in cut(stream, range(7, len(stream), 101)):
        for event in split_block(splitter.feed(piece)):
            assert event == events.pop(0)
    assert events == []


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_reads_that_end_with_lines_do_not_tear_events(ending):
    event = b": c\nid: 1\ndata: x\ndata: y\n: c\ndata: z\n\n"
    reads = [line + ending for line in (event * 2).split(b"\n")[:-1]]

    assert feed_all(reads) == b"id: 1\ndata: x\ndata: y\ndata: z\n\n" * 2
    assert feed_all([reads[0], *reads]) == b"id: 1\ndata: x\ndata: y\ndata: z\n\n" * 2


def test_a_read_that_looks_whole_completes_the_event_before_it():
    splitter = EventSplitter()
    splitter.feed(CHUNK)

    assert splitter.feed(b"data: x\n") == b""
    assert splitter.feed(CHUNK) == b"data: x\n" + CHUNK


@pytest.mark.case("C22")
def test_an_event_leaves_with_the_byte_that_completes_it():
    splitter = EventSplitter()

    assert splitter.feed(CHUNK[:-1]) == b""
    assert splitter.feed(CHUNK[-1:]) == CHUNK
    assert splitter.feed(b"data: x\r\n\r") == b"data: x\n\n"  # an LF may follow, or not


@pytest.mark.case("C18")
def test_cr_and_lf_of_two_reads_are_one_line_end():
    assert feed_all([b"data: x\r", b"\ndata: y\r", b"\n\r", b"\n"]) == b"data: x\ndata: y\n\n"


@pytest.mark.case("C18")
def test_a_cr_that_ended_its_line_does_not_swallow_the_blank_line():
    assert feed_all([b"data: x\r", b"\r\n", b"data: y\r\r"]) == b"data: x\n\ndata: y\n\n"


# --- what is dropped


@pytest.mark.case("C19")
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b": ping\n\n" + CHUNK, id="before"),
        pytest.param(CHUNK + b":\n\n", id="after"),
        pytest.param(b": ping\n" + CHUNK, id="glued-before"),
        pytest.param(CHUNK[:-1] + b":ping\n\n", id="glued-after"),
        pytest.param(b"\n\n\n" + CHUNK + b"\n\n\n\n", id="blank-lines"),
        pytest.param(b"id: 7\n\nretry: 5\n\nevent: ping\n\n" + CHUNK, id="fields-without-data"),
        pytest.param(b": data: x\n\n" + CHUNK, id="data-in-a-comment"),
        pytest.param(BOM + CHUNK, id="byte-order-mark"),
        pytest.param(b" data: x\n\ndatabase: x\n\nDATA: x\n\n" + CHUNK, id="not-data"),
    ],
)
def test_comments_and_events_without_data_are_dropped(stream):
    for position in range(len(stream) + 1):
        assert feed_all([stream[:position], stream[position:]]) == CHUNK


@pytest.mark.case("C19")
def test_a_lone_comment_gives_nothing_to_write():
    splitter = EventSplitter()

    assert [splitter.feed(read) for read in (b": ping\n", b"\n", b":\n\n")] == [b"", b"", b""]
    assert splitter.pending == b""


def test_a_byte_order_mark_later_on_is_not_one():
    assert feed_all([CHUNK, BOM + b"data: x\n\n"]) == CHUNK


# --- the end of a stream


@pytest.mark.parametrize(
    ("tail", "flushed", "pending"),
    [
        pytest.param(b"", b"", b"", id="clean"),
        pytest.param(b"data: x\n", b"data: x\n\n", b"", id="blank-line-missing"),
        pytest.param(b"id: 1\r\ndata: x\r", b"id: 1\ndata: x\n\n", b"", id="crlf"),
        pytest.param(b"data: [DONE]", DONE, b"", id="done"),
        pytest.param(b"data:[DONE]", b"data:[DONE]\n\n", b"", id="done-without-space"),
        pytest.param(b'data: {"a', b"", b'data: {"a', id="cut-in-a-line"),
        pytest.param(b": ping\n: p", b"", b"", id="cut-in-a-comment"),
        pytest.param(b": ping\n", b"", b"", id="comment"),
        pytest.param(b"id: 1\n", b"", b"", id="no-data"),
        pytest.param(b": c\ndata: x\nda", b"", b"data: x\nda", id="cut-in-the-second-line"),
    ],
)
def test_flush_tells_a_whole_tail_from_a_cut_one(tail, flushed, pending):
    splitter = EventSplitter()
    splitter.feed(CHUNK)

    assert splitter.feed(tail) == b""
    assert splitter.flush() == flushed
    assert splitter.pending == pending


# --- size


@pytest.mark.case("C20")
def test_a_large_event_in_small_reads_takes_linear_time():
    large = encode_data(b'{"text":"' + b"x" * (2 * 1024 * 1024) + b'"}')
    stream = CHUNK + large + CHUNK
    started = time.process_time()

    events = split_block(feed_all(stream[i : i + 1024] for i in range(0, len(stream), 1024)))

    assert events == [CHUNK, large, CHUNK]
    assert time.process_time() - started < 1


def test_an_unfinished_event_over_the_limit_is_refused():
    splitter = EventSplitter(max_event_bytes=100)
    splitter.feed(b"data: " + b"x" * 90)

    with pytest.raises(EventTooLarge, match="larger than 100 bytes"):
        splitter.feed(b"xxxxx")
    assert splitter.pending == b""


# --- single events


def test_split_block_gives_single_events():
    assert split_block(b"") == []
    assert split_block(CHUNK) == [CHUNK]
    assert split_block(CHUNK + DONE) == [CHUNK, DONE]


@pytest.mark.case("C17")
@pytest.mark.parametrize(
    ("event", "data"),
    [
        pytest.param(b"data:x\n\n", b"x", id="no-space"),
        pytest.param(b"data: x\n\n", b"x", id="one-space"),
        pytest.param(b"data:  x\n\n", b" x", id="two-spaces"),
        pytest.param(b"data:\tx\n\n", b"\tx", id="tab"),
        pytest.param(b"data\n\n", b"", id="no-colon"),
        pytest.param(b"data: x\ndata:y\ndata\ndata:  z\n\n", b"x\ny\n\n z", id="lines"),
        pytest.param(b"event: e\ndata: x\nid: 1\n\n", b"x", id="other-fields"),
        pytest.param(b"event: e\n\n", b"", id="none"),
    ],
)
def test_data_of_joins_the_data_lines(event, data):
    assert data_of(event) == data


def test_with_data_keeps_the_other_lines():
    event = b"event: e\ndata:x\nid: 1\ndata: y\n\n"

    assert with_data(event, b"new") == b"event: e\nid: 1\ndata: new\n\n"


@given(st.lists(st.sampled_from([b"", b"x", b" ", b"data: y", b":"]), min_size=1))
def test_encoded_data_is_read_again(lines):
    data = b"\n".join(lines)
    event = encode_data(data)

    assert data_of(event) == data
    assert feed_all([event]) == event


# --- properties

_line = st.one_of(
    st.sampled_from(
        [b"data: x", b"data:{}", b"data", b": ping", b":", b"event: e", b"id: 1", b"x", b" "]
    ),
    st.text(alphabet="aé你🙂:", max_size=8).map(lambda text: b"data: " + text.encode()),
)
_token = st.one_of(_line, st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", BOM]))
_stream = st.lists(_token, max_size=30).map(b"".join)
_positions = st.one_of(
    st.lists(st.integers(0, 1000), max_size=8),
    st.integers(1, 5).map(lambda size: list(range(0, 1000, size))),
)


@pytest.mark.case("C15", "C16", "C18", "C19")
@given(
    st.lists(st.lists(_line, min_size=1, max_size=4), max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    _positions,
)
def test_any_events_in_any_line_ends_and_cuts_are_those_of_the_whole_lf_stream(
    events, ending, positions
):
    plain = b"".join(b"".join(line + b"\n" for line in event) + b"\n" for event in events)
    stream = plain.replace(b"\n", ending)

    assert feed_all(cut(stream, positions)) == b"".join(expected_events(plain))


@given(_stream, _positions)
def test_mixed_line_ends_are_read_as_the_standard_says(stream, positions):
    assert feed_all(cut(stream, positions)) == b"".join(expected_events(stream))


@given(st.binary(max_size=200), _positions)
def test_arbitrary_bytes_give_the_same_however_they_are_cut(stream, positions):
    whole = EventSplitter()
    pieces = EventSplitter()

    assert feed_all(cut(stream, positions), pieces) == feed_all([stream], whole)
    assert pieces.pending == whole.pending
    assert pieces.flush() == whole.flush()


@given(st.lists(st.one_of(st.binary(max_size=40), _stream), max_size=10))
def test_nothing_but_too_large_is_ever_raised(reads):
    splitter = EventSplitter(max_event_bytes=64)
    for read in reads:
        try:
            block = splitter.feed(read)
        except EventTooLarge:
            continue
        for event in split_block(block):
            assert event.endswith(b"\n\n")
            assert event.find(b"\n\n") == len(event) - 2
            assert b"\r" not in event
            assert not any(line.startswith(b":") for line in event.split(b"\n"))
    splitter.flush()
