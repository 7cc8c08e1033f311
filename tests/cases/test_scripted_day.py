"""A day in small: after requests of every kind, each figure of the metrics is exactly right."""

from __future__ import annotations

import pytest

from tests.cases.scene import COMPLETIONS, Scene, completion, scene
from tests.fakes import behaviours, client
from tests.fakes.answer import event_bytes
from tests.fakes.client import RawClient, assert_ends_in_error, assert_whole_stream
from tests.fakes.proxy import Sample, assert_quiescent, metrics
from tests.fakes.waiting import until_answer

PLAIN_TOKENS, CUT_AT, CUT_TOKENS, SPOKEN = 4, 2, 6, 2
PLAIN, CUT, REFUSED, LEFT, BROKEN = 7, 3, 2, 2, 1
GOOD = PLAIN + CUT
ALL = GOOD + REFUSED + LEFT + BROKEN
ARGS = ("--retry-delay", "0", "--continue-lost", "off", "--max-retries", "1")
LATE_S = 10.0  # on a busy machine
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
WORD = event_bytes({"choices": [{"index": 0, "text": "mot ", "finish_reason": None}]})
REQUESTS = {"endpoint": COMPLETIONS, "model": "toy", "stream": "true"}
WHOLE = {"endpoint": COMPLETIONS, "model": "toy"}


async def good_streams(day: Scene) -> None:
    for _ in range(PLAIN):
        reply = await day.post(COMPLETIONS, completion(max_tokens=PLAIN_TOKENS, **USAGE))
        assert_whole_stream(reply)
    for _ in range(CUT):
        day.d1.behaviour = behaviours.one_after_another(
            behaviours.recompute(CUT_AT), behaviours.decode
        )
        reply = await day.post(COMPLETIONS, completion(max_tokens=CUT_TOKENS, **USAGE))
        assert_whole_stream(reply)


async def refused_by_the_prefiller(day: Scene) -> None:
    day.p1.behaviour = behaviours.error(400)
    for _ in range(REFUSED):
        assert (await day.post(COMPLETIONS, completion(**USAGE))).status == 400
    day.p1.behaviour = behaviours.prefill


async def clients_that_leave(day: Scene) -> None:
    """One leaves before the decoder says anything, one in the middle of the answer."""
    day.d1.behaviour = behaviours.hang
    known = len(day.d1.calls)
    async with await RawClient.connect(day.port) as peer:
        body = client.as_json(completion(**USAGE))
        await peer.send_request("POST", COMPLETIONS, body, client.JSON_TYPE)
        await day.d1.wait_for_calls(known + 1)
    await until_quiet(day)  # the engine may look up how to behave only now
    day.d1.behaviour = behaviours.stream([WORD] * SPOKEN, then="hang")
    async with day.streaming(completion(**USAGE), COMPLETIONS) as (peer, reply):
        seen = 0
        while seen < SPOKEN:  # several events may come in one chunk
            seen += (await peer.read_chunk(reply) or b"").count(b"mot")


async def decoder_that_breaks(day: Scene) -> None:
    day.d1.behaviour = behaviours.stream([WORD] * SPOKEN, then="close")
    assert_ends_in_error(await day.post(COMPLETIONS, completion(**USAGE)))


async def until_quiet(day: Scene) -> None:
    await assert_quiescent(day.proxy, day.p1, day.d1, within_s=20)


class Page:
    """The metrics at the end of the day."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def sum(self, name: str, **labels: str) -> float:
        found = [s for s in self._samples if s.name == f"pdproxy_{name}"]
        assert found, f"{name} is not there"
        return sum(s.value for s in found if labels.items() <= s.labels.items())

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the samples that are not zero, by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for sample in self._samples:
            if sample.name == f"pdproxy_{name}" and sample.value:
                key = tuple(sample.labels[label] for label in labels)
                found[key] = found.get(key, 0) + sample.value
        return found


async def page_of(day: Scene, late_s: float) -> Page:
    """Return the page once the last request has ended: the client's part of it ends earlier.

    With several workers each shows what the others counted a little later, `late_s` at most.
    """
    await until_quiet(day)
    if late_s:
        await until_answer(lambda: _is_settled(day), late_s)
    return Page(await metrics(day.proxy))


async def _is_settled(day: Scene) -> bool:
    """Whether the last figures that a request writes are there."""
    page = Page(await metrics(day.proxy))
    counts = ("requests_total", "request_duration_seconds_count", "overhead_seconds_count")
    return all(page.sum(name) == ALL for name in counts)


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [1, 2])
async def test_every_figure_of_a_day_is_right(workers):
    async with scene([None], [None], *ARGS, "--workers", str(workers), process=True) as day:
        await good_streams(day)
        await refused_by_the_prefiller(day)
        await clients_that_leave(day)
        await decoder_that_breaks(day)
        page = await page_of(day, 0 if workers == 1 else LATE_S)

    assert_requests(page, workers)
    assert_times(page, workers)
    assert_legs(page, day)
    assert_tokens(page)


def assert_requests(page: Page, workers: int) -> None:
    assert page.by("requests_total", "outcome", "status_code") == {
        ("success", "200"): GOOD,
        ("client_error", "400"): REFUSED,
        ("client_disconnected", "499"): 1,
        ("client_disconnected", "200"): 1,
        ("engine_error", "200"): BROKEN,
    }
    assert page.sum("requests_total") == page.sum("requests_total", **requests(workers)) == ALL
    assert page.by("client_disconnects_total", "phase") == {("first_token",): 1, ("decode",): 1}
    assert page.sum("rejected_total") == 0


def requests(workers: int) -> dict[str, str]:
    """Return the labels of all requests: a worker learns a model's name when an engine takes it.

    So what is refused by one that has served nothing yet is under no name.
    """
    return REQUESTS if workers == 1 else {k: v for k, v in REQUESTS.items() if k != "model"}


def assert_times(page: Page, workers: int) -> None:
    begun = ALL - REFUSED  # got to a decoder
    spoke = begun - 1  # got content
    assert page.sum("request_duration_seconds_count", **requests(workers)) == ALL
    assert page.sum("time_to_first_token_seconds_count", **WHOLE) == spoke
    assert page.sum("time_per_output_token_seconds_count", **WHOLE) == GOOD
    gaps = PLAIN * (PLAIN_TOKENS - 1) + CUT * (CUT_TOKENS - 1) + 2 * (SPOKEN - 1)
    assert page.sum("inter_token_latency_seconds_count", **WHOLE) == gaps
    assert page.by("stage_duration_seconds_count", "stage") == {
        ("queue",): ALL,
        ("prefill",): ALL,
        ("handoff",): begun,
        ("first_token",): begun,
        ("decode",): spoke,
    }
    stages_s = page.sum("stage_duration_seconds_sum")
    assert stages_s == pytest.approx(page.sum("request_duration_seconds_sum"))
    assert page.sum("overhead_seconds_count", endpoint=COMPLETIONS) == ALL
    assert 0 < page.sum("overhead_seconds_sum") < stages_s


def assert_legs(page: Page, day: Scene) -> None:
    rounds = ALL - REFUSED + CUT
    assert page.by("upstream_requests_total", "role", "instance", "outcome") == {
        ("prefill", day.p1.address, "success"): rounds,
        ("prefill", day.p1.address, "error"): REFUSED,
        ("decode", day.d1.address, "success"): GOOD,
        ("decode", day.d1.address, "error"): CUT + BROKEN,
        ("decode", day.d1.address, "abandoned"): LEFT,
    }
    assert page.by("upstream_errors_total", "role", "reason") == {
        ("prefill", "status_4xx"): REFUSED,
        ("decode", "kv_cache_exhausted"): CUT,
        ("decode", "lost"): BROKEN,
    }
    assert page.by("routing_decisions_total", "role", "policy", "reason") == {
        ("prefill", "least_load", "only_one"): rounds + REFUSED,
        ("decode", "least_load", "only_one"): rounds,
    }
    assert page.by("kv_exhausted_total", "instance") == {(day.d1.address,): CUT}
    assert page.by("recomputes_total", "result") == {("resumed",): CUT}
    assert page.sum("recompute_attempts_count") == page.sum("recompute_attempts_sum") == CUT
    for name in ("retries_total", "failovers_total", "prefill_skipped_total"):
        assert page.sum(name) == 0, name


def assert_tokens(page: Page) -> None:
    generated = PLAIN * PLAIN_TOKENS + CUT * CUT_TOKENS
    assert page.sum("generation_tokens_total", model="toy") == generated
    assert page.sum("recomputed_tokens_total") > 0
