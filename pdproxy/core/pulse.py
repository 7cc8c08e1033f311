"""The beat of one stream: gaps between its content events, and the proxy's own work on them.

Rule: this is noted per token, so a gap costs one search in a short tuple and one addition; the
counts go to the histogram many at a time.
"""

from __future__ import annotations

from bisect import bisect_left

from pdproxy.core.timeline import Stage, Timeline

# The edges of vLLM's histograms of the same, so that dashboards of both line up.
GAP_EDGES_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_DECODE = Stage.DECODE  # an enumeration's member takes a call to look up

# After so many gaps a stream that still runs is counted: a few seconds of one.
FULL = 256


class Pulse:
    """What one request's streams, of all rounds and prompts, write as their content passes.

    Attributes:
        counts: gaps noted since they were last taken, per edge; one more for those above all.
        sum_s: of these gaps.
        is_hidden: what was written last did not reach the client.
        work_s: what the relay took for reading, changing and writing the answer.
    """

    __slots__ = ("_timeline", "counts", "is_hidden", "noted", "sum_s", "work_s")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.is_hidden = False
        self.work_s = 0.0
        self.clear()

    def clear(self) -> None:
        """Begin to count anew, once the counts were taken."""
        self.counts = [0] * (len(GAP_EDGES_S) + 1)
        self.noted = 0
        self.sum_s = 0.0

    def beat(self, now: float, events: int) -> bool:
        """Note `events` content events written in one go; return whether it is time to take them.

        Those after the first follow it without a gap.
        """
        if self.is_hidden:
            return False
        timeline = self._timeline
        last, more = timeline.last_content, events - 1
        if last is None or timeline.stage is not _DECODE:
            timeline.mark_content(now)
        if last is not None:
            timeline.last_content = now
            gap_s = now - last
            self.counts[bisect_left(GAP_EDGES_S, gap_s)] += 1
            self.sum_s += gap_s
            self.noted += 1
        if more:
            self.counts[0] += more
            self.noted += more
        return self.noted >= FULL
