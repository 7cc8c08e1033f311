"""Numbers that an engine counts for /metrics, and how they are written down."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Upper bounds in seconds; a coarse version of vLLM's buckets.
_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """Observed durations, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BOUNDS_S, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The histogram's samples in Prometheus text form."""
        seen = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(seen)}'
        yield f"{name}_count{{{labels}}} {float(seen)}"
        yield f"{name}_sum{{{labels}}} {self.total}"


@dataclass(slots=True)
class Counters:
    """What one engine has done since its start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    bad_handles: int = 0
    wrong_transfers: int = 0
    failed_transfers: int = 0
    rejected: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    queue_time: Histogram = field(default_factory=Histogram)
    prefill_time: Histogram = field(default_factory=Histogram)
    decode_time: Histogram = field(default_factory=Histogram)
    first_token_time: Histogram = field(default_factory=Histogram)
    total_time: Histogram = field(default_factory=Histogram)

    def count_prompt(
        self, tokens: int, cached: int, is_valid: bool | None, waited_s: float
    ) -> None:
        """Count a prompt whose KV has come.

        Args:
            tokens: Its length.
            cached: Found in the own prefix cache.
            is_valid: Whether a transfer brought the right blocks; None if there was none.
            waited_s: Time since its admission.
        """
        self.prompt_tokens += tokens
        self.cache_queries += tokens
        self.cache_hits += cached
        self.by_source["local_cache_hit"] += cached
        self.prefill_time.observe(waited_s)
        if is_valid is None:
            self.by_source["local_compute"] += tokens - cached
            return
        self.by_source["external_kv_transfer"] += tokens - cached
        self.external_queries += tokens - cached
        self.external_hits += tokens - cached
        self.wrong_transfers += not is_valid


def labelled(labels: Mapping[str, str]) -> str:
    """Labels in Prometheus text form, without the braces."""
    return ",".join(f'{name}="{value}"' for name, value in labels.items())
