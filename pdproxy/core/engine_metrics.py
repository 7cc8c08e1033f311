"""What an engine's metrics page says of its KV cache and its queue.

A scan for five lines instead of a parser: the page has thousands that are not wanted. Names and
labels are those of vLLM (v1/metrics/loggers.py); an engine that has none of them says nothing.
"""

from __future__ import annotations

import re

from pdproxy.core.record import NO_REPORT, EngineReport

# A cache of which less is held, by our count, tells nothing of what is shared.
TELLING_SHARE = 0.25
MIN_KV_WEIGHT = 0.05

# No engine has more of anything. What is summed from such numbers still has 64 bits, which is
# what other processes are told it in.
_MOST = 10**12

_LINE = re.compile(
    rb"^vllm:(cache_config_info|kv_cache_usage_perc|gpu_cache_usage_perc"
    rb"|num_requests_running|num_requests_waiting)(?:\{(.{0,4000})\})? +(\S{1,40})",
    re.MULTILINE,
)
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="(\d{1,12})"')
_BLOCK_SIZE = re.compile(rb'(?:^|,)block_size="(\d{1,6})"')


def read_report(page: bytes) -> EngineReport | None:
    """Return what a metrics page says; None if it has nothing of it.

    A server of several engines (data parallel) has a line for each: sums, and the mean use.
    """
    capacity_tokens = 0
    values: dict[bytes, list[float]] = {}
    for name, labels, text in _LINE.findall(page):
        if name == b"cache_config_info":
            capacity_tokens += _capacity_tokens(labels)
        elif (value := _number(text)) is not None:
            values.setdefault(name, []).append(value)
    usage = values.get(b"kv_cache_usage_perc") or values.get(b"gpu_cache_usage_perc")
    report = EngineReport(
        capacity_tokens=capacity_tokens or None,
        kv_usage=sum(usage) / len(usage) if usage else None,
        running=_count(values.get(b"num_requests_running")),
        waiting=_count(values.get(b"num_requests_waiting")),
    )
    return None if report == NO_REPORT else report


def kv_weight(report: EngineReport, held_tokens: int, before: float) -> float:
    """Return what one token of KV cache that is held by our count takes on the engine, up to 1.

    Requests that share a prefix share its blocks, and are counted apart here. It is the mean of
    what this report shows and what was found `before`; a report of an engine that holds little
    shows nothing.
    """
    capacity, usage = report.capacity_tokens, report.kv_usage
    if capacity is None or usage is None or held_tokens < TELLING_SHARE * capacity:
        return before
    shown = min(1.0, max(MIN_KV_WEIGHT, usage * capacity / held_tokens))
    return (before + shown) / 2


def _capacity_tokens(labels: bytes) -> int:
    blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search(labels)
    tokens = int(blocks[1]) * int(size[1]) if blocks and size else 0
    return tokens if tokens <= _MOST else 0


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None  # not a number is neither


def _count(values: list[float] | None) -> int | None:
    return int(sum(values)) if values else None
