"""Bytes of an event stream -> whole, normalised SSE events, whatever way the bytes were cut.

Rule: what leaves is always whole events with LF line ends and no comment in them; the bytes of
a field line are never rewritten. Clients exist that take one TCP read for one event and stumble
over a lone comment or a CRLF.

Source: HTML standard, 9.2.5 and 9.2.6 (event streams).
"""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"

# One event may hold the log probabilities or ids of a whole prompt; a million tokens fit.
MAX_EVENT_BYTES = 64 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"
_DONE_DATA = b"[DONE]"


class EventTooLarge(ValueError):
    """More bytes came without the end of an event than the splitter may hold."""


class EventSplitter:
    """Cuts a stream into blocks of whole events, in time linear in the bytes fed."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._between_events = False  # nothing is held back: the next byte starts an event
        self._at_start = True  # a byte order mark may still come
        self._skip_lf = False  # the last byte was a CR, which an LF would belong to
        self._held: list[bytes] = []  # an unfinished event: LF line ends, no blank line
        self._held_bytes = 0

    def feed(self, data: bytes) -> bytes:
        r"""Return the whole events that `data` completes as one block, `b""` if there are none.

        A read of nothing but whole events (`data: {...}\n\n`, once or several times) is returned
        as the same object. An event without a `data` line is dropped: no client acts on it.

        Raises:
            EventTooLarge: an unfinished event outgrew `max_event_bytes`; it is dropped.
        """
        if self._between_events and _is_clean(data):
            return data
        return self._feed(data)

    @property
    def pending(self) -> bytes:
        """The unfinished event without its comments; not empty at the end of a cut stream."""
        return b"\n".join(_field_lines(b"".join(self._held)))

    def flush(self) -> bytes:
        """Return the event that lacks only its blank line, `b""` otherwise; for a clean end.

        An event that ends inside a line is not returned and stays in `pending`, but for a
        `[DONE]`, which cannot be mistaken.
        """
        tail = b"".join(self._held)
        if not tail.endswith(b"\n") and data_of(tail) != _DONE_DATA:
            return b""
        self._hold(b"")
        return _normalised(tail)

    def _feed(self, data: bytes) -> bytes:
        if self._at_start:
            data = self._without_bom(data)
        data = self._with_lf(data)
        end = self._end_of_events(data)
        if not end:
            self._hold_more(data)
            return b""
        block = b"".join((*self._held, data[:end]))
        self._hold(data[end:])
        return block if _is_clean(block) else _normalised(block)

    def _without_bom(self, data: bytes) -> bytes:
        data = b"".join((*self._held, data))
        self._hold(b"")
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._hold_more(data)
            return b""
        self._at_start = False
        return data.removeprefix(_BOM)

    def _with_lf(self, data: bytes) -> bytes:
        """Turn CR and CRLF into LF; a CR ends its line at once, an LF of the next read is its."""
        if self._skip_lf and data:
            self._skip_lf = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _end_of_events(self, data: bytes) -> int:
        """Return where in `data` the last blank line ends, 0 if no event ends here."""
        at = data.rfind(b"\n\n")
        if at >= 0:
            return at + 2
        ends_a_line = bool(self._held) and self._held[-1].endswith(b"\n")
        return 1 if ends_a_line and data.startswith(b"\n") else 0

    def _hold(self, data: bytes) -> None:
        self._held = []
        self._held_bytes = 0
        self._hold_more(data)

    def _hold_more(self, data: bytes) -> None:
        if data:
            self._held.append(data)
            self._held_bytes += len(data)
        self._between_events = not (self._held or self._at_start or self._skip_lf)
        if self._held_bytes > self._max_event_bytes:
            self._hold(b"")
            raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes")


def split_block(block: bytes) -> list[bytes]:
    r"""Return the single events of a normalised block, each with its `\n\n`."""
    if block.find(b"\n\n") == len(block) - 2:
        return [block]
    return [event + b"\n\n" for event in block.split(b"\n\n") if event]


def data_of(event: bytes) -> bytes:
    r"""Return the joined data lines of one event, each without its one optional space.

    `data:x` and `data: x` give `x`; a tab stays, as the standard has it. `b""` if there is none.
    """
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:
        return event[5:-2].removeprefix(b" ")
    values = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if _is_data(line))
    return b"\n".join(values)


def encode_data(data: bytes) -> bytes:
    r"""Return `data` as one event: `data: ...\n\n`, a data line for each of its lines."""
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def with_data(event: bytes, data: bytes) -> bytes:
    """Return the event with other data; its other lines (`event: x`, `id: 7`) come first."""
    lines = [line for line in event.split(b"\n") if line and not _is_data(line)]
    return b"".join(line + b"\n" for line in lines) + encode_data(data)


def _is_clean(data: bytes) -> bool:
    """Say whether `data` is nothing but events of one data line each, as they shall leave."""
    if not data.startswith(b"data:") or not data.endswith(b"\n\n") or data.find(b"\r") >= 0:
        return False
    if data.find(b"\n") == len(data) - 2:
        return True
    # Each line end belongs to the blank line before a data line, or to the last blank line.
    return data.count(b"\n") == 2 * data.count(b"\n\ndata:") + 2


def _normalised(block: bytes) -> bytes:
    """Return the events of `block` (LF line ends) that have data, without their comments."""
    events = []
    for event in block.split(b"\n\n"):
        lines = _field_lines(event)
        if any(_is_data(line) for line in lines):
            events.append(b"\n".join(lines) + b"\n\n")
    return b"".join(events)


def _field_lines(event: bytes) -> list[bytes]:
    return [line for line in event.split(b"\n") if line and not line.startswith(b":")]


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") or line == b"data"
