"""Where an engine's answer begins and ends: bytes in, status, headers and body bytes out, no I/O.

Rule: only the parser decides where a message ends. Whatever follows that end, or cannot be read,
costs the connection its reuse and never changes the message.
"""

from __future__ import annotations

import httptools

# Statuses whose answers have no body whatever their headers say: RFC 9112, section 6.3, rule 1.
_BODYLESS = frozenset({204, 304})
_FIRST_STATUS = 100
_SWITCHING_PROTOCOLS = 101
_FIRST_FINAL_STATUS = 200
_LAST_STATUS = 599
_HEADER_OVERHEAD_BYTES = 4  # ": " and the line's end


class ResponseParser:
    """Reads one response after another; `start` before each.

    Attributes:
        has_head: the final (not 1xx) head is complete; `status` and `headers` are set.
        headers: in their order, names in lower case.
        is_complete: the message has ended; nothing more will be returned.
        is_reusable: complete, kept alive by both sides' rules, and nothing followed it.
        fault: why the bytes are not a response; None as long as they are one.
    """

    __slots__ = (
        "_end",
        "_execute",
        "_has_extra",
        "_is_head_request",
        "_is_interim",
        "_max_head_bytes",
        "_parser",
        "_parts",
        "_quiet_bytes",
        "fault",
        "has_head",
        "headers",
        "is_complete",
        "is_reusable",
        "on_body",
        "status",
    )

    def __init__(self, max_head_bytes: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # the parser calls it without a Python frame
        self._parser = httptools.HttpResponseParser(self)
        self._execute = self._parser.feed_data
        self.start()

    def start(self, *, is_head_request: bool = False) -> None:
        """Expect a new response; one to HEAD ends with its head."""
        self._is_head_request = is_head_request
        self._is_interim = False
        self._has_extra = False
        self._quiet_bytes = 0
        self._end = 0
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.has_head = False
        self.is_complete = False
        self.is_reusable = False
        self.fault: str | None = None

    @property
    def is_untouched(self) -> bool:
        """Not one byte of the response has come."""
        return not self.has_head and self._quiet_bytes == 0

    def feed(self, data: bytes) -> bytes:
        """Take what one read brought; return the body bytes in it, in one piece.

        Never raises: look at `fault` afterwards. Body bytes ahead of a fault are returned.
        """
        self._quiet_bytes += len(data)
        try:
            self._execute(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(str(error))
        parts = self._parts
        if self.is_complete:
            del parts[self._end :]
        if not parts:
            self._check_quiet()
            return b""
        self._quiet_bytes = 0
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return body

    def end_of_input(self) -> bool:
        """The engine has closed its side; return whether that ends the message as it should."""
        if self.is_complete:
            return True
        if not self.has_head or self.fault is not None or self._is_framed():
            return False
        self.is_complete = True
        return True

    def forget_parser(self) -> None:
        """Break the reference cycle with the C parser; nothing can be fed afterwards."""
        del self._parser, self._execute

    # --- called by the C parser, which must not see an exception

    def on_message_begin(self) -> None:
        """Note what follows a complete message: nothing may, as nothing else was asked."""
        if self.is_complete:
            self._has_extra = True
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header line; trailers are dropped."""
        if self.has_head:
            return
        key = name.lower().decode("latin-1")
        text = value.decode("latin-1").rstrip(" \t")
        self.headers.append((key, text))
        if key == "transfer-encoding" and text.lower() != "chunked":
            self._refuse(f"transfer encoding {text[:40]!r}")

    def on_headers_complete(self) -> None:
        """Tell an interim head from the final one, and a bodyless message from others."""
        if self.has_head:
            return
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            self._skip_interim(status)
            return
        if status > _LAST_STATUS:
            self._refuse(f"status {status}")
            return
        if self._quiet_bytes > self._max_head_bytes and self._head_size() > self._max_head_bytes:
            self._refuse("the head is too large")
            return
        self.status = status
        self.has_head = True
        if self._is_head_request or status in _BODYLESS:
            self._complete()

    def on_message_complete(self) -> None:
        """Note the end, and whether the connection may serve another request."""
        if self._is_interim:
            self._is_interim = False
            return
        if self._has_extra or self.fault is not None:
            return
        if not self.is_complete:
            self._complete()
        elif len(self._parts) > self._end:
            return  # a body where none belongs
        self.is_reusable = self._parser.should_keep_alive()

    # --- own

    def _complete(self) -> None:
        self._end = len(self._parts)
        self.is_complete = True

    def _skip_interim(self, status: int) -> None:
        self._is_interim = True
        self.headers = []
        if status < _FIRST_STATUS or status == _SWITCHING_PROTOCOLS:
            self._refuse(f"status {status}")

    def _refuse(self, reason: str) -> None:
        """Give up reading; a message that is already complete stays as it is."""
        self.is_reusable = False
        if not self.is_complete and self.fault is None:
            self.fault = reason

    def _check_quiet(self) -> None:
        """Bound heads, trailers and chunk extensions: bytes that bring no body."""
        if not self.is_complete and self._quiet_bytes > self._max_head_bytes:
            self._refuse("too many bytes without a body" if self.has_head else "endless head")

    def _head_size(self) -> int:
        return sum(len(name) + len(value) + _HEADER_OVERHEAD_BYTES for name, value in self.headers)

    def _is_framed(self) -> bool:
        return any(name in {"content-length", "transfer-encoding"} for name, _ in self.headers)
