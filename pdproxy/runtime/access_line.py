"""The access line: what the log says of each request once it has ended.

Rule: nothing that a client sent but its request id, its address and the model's name, and no key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from pdproxy.core.jsonfields import encode
from pdproxy.core.policy import Reason
from pdproxy.dispatch.account import Account, Outcome

ACCESS = logging.getLogger("pdproxy.access")
MAX_MODEL_CHARACTERS = 64
_SHOWN_CUTS = 8  # the last ones; more say nothing new
# Most values: ASCII that is visible, without quotes and "=".
_BARE = re.compile(r"[!#-<>-~]+").fullmatch
# Requests have most of a line in common; what they do not is a number.
_REMEMBERED = 4096


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
        return "\n".join([access_text(account) for _, account in self.each(0.0)])

    def each(self, now_s: float) -> Iterator[tuple[float, Account]]:
        """Give each request with the time at which it ended.

        `now_s` is the moment of `now` on the clock of these times.
        """
        for account in self._accounts:
            finished = account.timeline.finished
            ago_s = 0.0 if finished is None else self._now - finished
            yield now_s - ago_s, account


def log_access(accounts: Sequence[Account], now: float) -> None:
    """Write the access lines of requests that have ended, by `now` of their clock."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    lines = AccessLines(accounts, now)
    # Made here, since the logger would look for the calling line, which costs as much again.
    ACCESS.handle(ACCESS.makeRecord(ACCESS.name, logging.INFO, __file__, 0, lines, (), None))


def access_fields(account: Account) -> dict[str, object]:
    """Return what the access line says; what is not known is left out."""
    return {
        "request_id": account.request_id,
        "client": account.client,
        **_common(account)[0],
        **_result(account),
    }


def access_text(account: Account) -> str:
    """Return the fields as a line that splits at spaces; values with spaces in them are quoted."""
    request_id, client = _shown(account.request_id), _shown_often(account.client)
    common = _common(account)[1]
    return f"request_id={request_id} client={client}{common}{_result_text(account)}"


# Fields that are told together: by their names, and as a part of the line.
_Told: TypeAlias = tuple[dict[str, object], str]


def _common(account: Account) -> _Told:
    """Return what many requests have in common: what was asked for, how it ended, and its way."""
    return _told(
        account.endpoint,
        account.model,
        account.is_stream,
        account.status,
        account.outcome,
        account.prefiller,
        account.decoder,
        account.prefiller_reason,
        account.decoder_reason,
        account.prefill_attempts,
        account.decode_attempts,
        account.rounds,
        account.prefill_skipped,
    )


@lru_cache(_REMEMBERED)
def _told(  # noqa: PLR0913 - each is a part of the key
    endpoint: str,
    model: str,
    is_stream: bool,
    status: int,
    outcome: Outcome,
    prefiller: str,
    decoder: str,
    prefiller_reason: Reason | None,
    decoder_reason: Reason | None,
    prefill_attempts: int,
    decode_attempts: int,
    rounds: int,
    prefill_skipped: str,
) -> _Told:
    known: dict[str, object] = {
        "endpoint": endpoint,
        "model": model[:MAX_MODEL_CHARACTERS] or None,
        "stream": is_stream or None,
        "status": status,
        "outcome": outcome,
        "prefiller": prefiller or None,
        "decoder": decoder or None,
        "prefiller_reason": prefiller_reason or None,
        "decoder_reason": decoder_reason or None,
        "prefill_attempts": prefill_attempts if prefill_attempts > 1 else None,
        "decode_attempts": decode_attempts if decode_attempts > 1 else None,
        "rounds": rounds if rounds > 1 else None,
        "prefill_skipped": prefill_skipped or None,
    }
    known = {name: value for name, value in known.items() if value is not None}
    return known, _text(known)


def _result(account: Account) -> dict[str, object]:
    """Return what no two requests have in common."""
    fields: dict[str, object] = {
        "cut_by": ",".join(account.cuts[-_SHOWN_CUTS:]) or None,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "finish": _finish(account) or None,
        **{name: seconds and round(seconds, 4) for name, seconds in _times(account)},
        "why": account.why or None if account.outcome is not Outcome.SUCCESS else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _result_text(account: Account) -> str:
    """Return the text of `_result`, in less than half of the time that its fields would take."""
    prompt, cached, output = account.prompt_tokens, account.cached_tokens, account.output_tokens
    text = f" cut_by={_shown(','.join(account.cuts[-_SHOWN_CUTS:]))}" if account.cuts else ""
    if prompt is not None:
        text += f" prompt_tokens={prompt}"
    if cached is not None:
        text += f" cached_tokens={cached}"
    if output is not None:
        text += f" output_tokens={output}"
    if account.finish_reasons:
        text += f" finish={_shown_often(_finish(account))}"
    for name, seconds in _times(account):
        if seconds is not None:
            text += f" {name}={seconds:.4f}"
    if account.outcome is not Outcome.SUCCESS and account.why:
        text += f" why={_shown(account.why)}"
    return text


def _finish(account: Account) -> str:
    reasons = account.finish_reasons
    return reasons[0] if len(reasons) == 1 else ",".join(sorted(set(reasons)))


def _times(account: Account) -> tuple[tuple[str, float | None], ...]:
    timeline, tokens = account.timeline, account.output_tokens
    queue, total = ("queue_s", timeline.queue_s), ("total_s", timeline.total_s)
    if not account.is_stream:
        return queue, total
    tpot_s = timeline.tpot_s(tokens) if tokens else None
    return queue, ("ttft_s", timeline.ttft_s), ("tpot_s", tpot_s), total


def _text(fields: Mapping[str, object]) -> str:
    return "".join([f" {n}={_shown(v) if isinstance(v, str) else v}" for n, v in fields.items()])


def _shown(text: str) -> str:
    """Quote what holds spaces or control characters."""
    if _BARE(text) or (text and text.isprintable() and not any(c in text for c in ' "=')):
        return str(text)  # a reason without its name
    quoted = encode(text).decode()
    return "".join(c if c.isprintable() else _escaped(c) for c in quoted)


_shown_often = lru_cache(_REMEMBERED)(_shown)


def _escaped(character: str) -> str:
    """Return a character as JSON escapes, such as a line separator that JSON lets stand."""
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
