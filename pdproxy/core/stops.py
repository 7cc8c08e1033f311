"""Stop strings that stand across a seam: begun in one round, completed in the next.

Rule: an engine looks for stop strings in the text of its own round only, so what begins before a
seam is found here; what begins behind it is the engine's to find.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdproxy.core.api import GenerateRequest
from pdproxy.core.plain import plain


def shows_stops(request: GenerateRequest) -> bool:
    """Tell whether a stop string is part of the output."""
    return plain(request.fields.get("include_stop_str_in_output")) is True


def hidden_stops(request: GenerateRequest) -> frozenset[str]:
    """Return the stop strings of which the client must not see even the start."""
    return frozenset() if shows_stops(request) else request.stops


def holds_back(request: GenerateRequest) -> bool:
    """Tell whether an engine holds back text: what may be all of a stop string but its end."""
    return any(len(stop) > 1 for stop in hidden_stops(request))


def start_of_stop(text: str, stops: Collection[str]) -> int:
    """Return how many characters at the end of a text may be the start of a stop string."""
    longest = max(map(len, stops), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was completed.

    Attributes:
        stop: the stop string.
        excess: how many characters at the end of the text so far are not part of the answer; there
            may be more than have come since the seam.
    """

    stop: str
    excess: int


class Straddle:
    """Looks for stop strings that begin before a seam.

    Args:
        before: the text before the seam.
        stops: all stop strings of the request.
        shows_stops: a stop string is part of the output.
    """

    def __init__(self, before: str, stops: Collection[str], *, shows_stops: bool) -> None:
        self._reach = max(map(len, stops), default=0) - 1
        self._before = before[-self._reach :] if self._reach > 0 else ""
        self._behind = ""
        self._stops = stops
        self._shows_stops = shows_stops

    def look(self, text: str) -> Stopped | None:
        """Take more text behind the seam; return the stop string that it completes first."""
        if not self._before or len(self._behind) >= self._reach:
            return None  # nothing that begins before the seam can be completed any more
        self._behind += text
        whole, seam = self._before + self._behind, len(self._before)
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            begin = whole.find(stop, max(0, seam - len(stop) + 1), seam + len(stop) - 1)
            if 0 <= begin < seam:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return None
        end, begin, stop = min(found)
        self._before = ""
        return Stopped(stop, len(whole) - (end if self._shows_stops else begin))
