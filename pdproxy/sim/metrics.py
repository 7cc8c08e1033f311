"""/metrics of an engine: vLLM's names and labels, Prometheus text form.

Source: the recorded exposition of vLLM 0.32; `sim:` names are our own.
"""

from collections.abc import Iterator

from pdproxy.sim.counters import Histogram, labelled
from pdproxy.sim.scheduler import Engine

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS = ("stop", "length", "abort", "error")


def exposition(engine: Engine) -> str:
    """The whole text."""
    labels = labelled({"engine": "0", "model_name": engine.config.model})
    parts = (_gauges(engine), _counters(engine), _histograms(engine))
    lines: list[str] = []
    for name, kind, samples in (sample for part in parts for sample in part):
        lines.append(f"# HELP {name} {name.partition(':')[2].replace('_', ' ')}")
        lines.append(f"# TYPE {name} {kind}")
        if isinstance(samples, Histogram):
            lines += samples.lines(name, labels)
            continue
        for extra, value in samples.items():
            inner = ",".join(filter(None, (labels, extra)))
            lines.append(f"{name}{{{inner}}} {float(value)}")
    return "\n".join(lines) + "\n"


Sample = tuple[str, str, dict[str, float] | Histogram]


def _gauges(engine: Engine) -> Iterator[Sample]:
    waiting, pulling = float(len(engine.waiting)), float(len(engine.fetcher.pulling))
    yield "vllm:num_requests_running", "gauge", {"": engine.running_count}
    yield "vllm:num_requests_waiting", "gauge", {"": waiting + pulling}
    by_reason = {'reason="capacity"': waiting, 'reason="deferred"': pulling}
    yield "vllm:num_requests_waiting_by_reason", "gauge", by_reason
    yield "vllm:kv_cache_usage_perc", "gauge", {"": engine.books.usage}
    config = engine.config
    info = labelled(
        {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "kv_cache_size_tokens": str(config.block_size * config.num_blocks),
            "num_gpu_blocks": str(config.num_blocks),
        }
    )
    yield "vllm:cache_config_info", "gauge", {info: 1}
    yield "sim:pinned_handles", "gauge", {"": len(engine.handles)}


def _counters(engine: Engine) -> Iterator[Sample]:
    counts, handles = engine.counters, engine.handles.counts
    by_source = {f'source="{name}"': counts.by_source[name] for name in _SOURCES}
    finished = {f'finished_reason="{name}"': counts.finished[name] for name in _REASONS}
    rejected = {'reason="max_num_queued_reqs"': counts.rejected}
    values: dict[str, dict[str, int]] = {
        "vllm:prefix_cache_queries_total": {"": counts.cache_queries},
        "vllm:prefix_cache_hits_total": {"": counts.cache_hits},
        "vllm:external_prefix_cache_queries_total": {"": counts.external_queries},
        "vllm:external_prefix_cache_hits_total": {"": counts.external_hits},
        "vllm:num_preemptions_total": {"": counts.preemptions},
        "vllm:prompt_tokens_total": {"": counts.prompt_tokens},
        "vllm:prompt_tokens_by_source_total": by_source,
        "vllm:generation_tokens_total": {"": counts.generation_tokens},
        "vllm:request_success_total": finished,
        "vllm:admission_rejections_total": rejected,
        "vllm:nixl_num_failed_transfers_total": {"": counts.failed_transfers},
        "vllm:nixl_num_kv_expired_reqs_total": {"": handles.expired},
        "vllm:nixl_num_notifications_after_expiry_total": {"": handles.late},
        "sim:bad_handles_total": {"": counts.bad_handles},
        "sim:wrong_transfers_total": {"": counts.wrong_transfers},
        "sim:handles_issued_total": {"": handles.issued},
        "sim:handles_pulled_total": {"": handles.pulled},
        "sim:handles_released_total": {"": handles.released},
    }
    for name, samples in values.items():
        yield name, "counter", {extra: float(value) for extra, value in samples.items()}


def _histograms(engine: Engine) -> Iterator[Sample]:
    counts = engine.counters
    yield "vllm:time_to_first_token_seconds", "histogram", counts.first_token_time
    yield "vllm:e2e_request_latency_seconds", "histogram", counts.total_time
    yield "vllm:request_queue_time_seconds", "histogram", counts.queue_time
    yield "vllm:request_prefill_time_seconds", "histogram", counts.prefill_time
    yield "vllm:request_decode_time_seconds", "histogram", counts.decode_time
