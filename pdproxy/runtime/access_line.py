"""The access line: what the log says of each request once it has ended.

Rule: nothing that a client sent but its request id, its address and the model's name, and no key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from pdproxy.core.jsonfields import encode
from pdproxy.dispatch.account import Account, Outcome

ACCESS = logging.getLogger("pdproxy.access")
MAX_MODEL_CHARACTERS = 64
# Most values: ASCII that is visible, without quotes and "=".
_BARE = re.compile(r"[!#-<>-~]+").fullmatch
_ALL_BARE = re.compile(r"\w+=[!#-<>-~]+(?: \w+=[!#-<>-~]+)*", re.ASCII).fullmatch


class AccessLines:
    """The message of a log record that stands for the lines of several requests.

    What formats the log asks for the lines one by one, and when each was due.
    """

    __slots__ = ("_accounts", "_now")

    def __init__(self, accounts: Sequence[Account], now: float) -> None:
        """Keep the accounts, until the record is written; `now` is a moment of their clock."""
        self._accounts = accounts
        self._now = now

    def __str__(self) -> str:  # type: ignore[explicit-override] # typing has it from 3.12
        return "\n".join([access_text(fields) for _, fields in self.each(0.0)])

    def each(self, now_s: float) -> Iterator[tuple[float, dict[str, object]]]:
        """Give for each request the time at which it ended, and what is said of it.

        `now_s` is the moment of `now` on the clock of these times.
        """
        for account in self._accounts:
            finished = account.timeline.finished
            ago_s = 0.0 if finished is None else self._now - finished
            yield now_s - ago_s, access_fields(account)


def log_access(accounts: Sequence[Account], now: float) -> None:
    """Write the access lines of requests that have ended, by `now` of their clock."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    lines = AccessLines(accounts, now)
    # Made here, since the logger would look for the calling line, which costs as much again.
    ACCESS.handle(ACCESS.makeRecord(ACCESS.name, logging.INFO, __file__, 0, lines, (), None))


def access_fields(account: Account) -> dict[str, object]:
    """Return what the access line says; what is not known is left out."""
    timeline, is_stream, tokens = account.timeline, account.is_stream, account.output_tokens
    fields: dict[str, object | None] = {
        "request_id": account.request_id,
        "client": account.client,
        "endpoint": account.endpoint,
        "model": account.model[:MAX_MODEL_CHARACTERS] or None,
        "stream": is_stream or None,
        "status": account.status,
        "outcome": account.outcome,
        "prefiller": account.prefiller or None,
        "decoder": account.decoder or None,
        "prefiller_reason": account.prefiller_reason,
        "decoder_reason": account.decoder_reason,
        "prefill_attempts": _if_many(account.prefill_attempts),
        "decode_attempts": _if_many(account.decode_attempts),
        "rounds": _if_many(account.rounds),
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": tokens,
        "finish": ",".join(sorted(set(account.finish_reasons))) or None,
        "queue_s": _rounded(timeline.queue_s),
        "ttft_s": _rounded(timeline.ttft_s) if is_stream else None,
        "tpot_s": _rounded(timeline.tpot_s(tokens)) if is_stream and tokens else None,
        "total_s": _rounded(timeline.total_s),
        "why": account.why or None if account.outcome is not Outcome.SUCCESS else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def access_text(fields: Mapping[str, object]) -> str:
    """Return the fields as a line that splits at spaces; values with spaces in them are quoted."""
    text = " ".join([f"{name}={value}" for name, value in fields.items()])
    if _ALL_BARE(text) and text.count("=") == len(fields):
        return text
    return " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])


def _if_many(count: int) -> int | None:
    return count if count > 1 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _shown(value: object) -> str:
    """Quote what holds spaces or control characters."""
    if not isinstance(value, str):
        return str(value)
    text = str(value)
    if _BARE(text):
        return text
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    quoted = encode(text).decode()
    return "".join(c if c.isprintable() else _escaped(c) for c in quoted)


def _escaped(character: str) -> str:
    """Return a character as JSON escapes, such as a line separator that JSON lets stand."""
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
