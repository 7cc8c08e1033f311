"""Names, labels from closed sets, and what the page says of requests and instances."""

from __future__ import annotations

import asyncio
import random
import re
import time

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES, Reason
from pdproxy.core.pulse import GAP_EDGES_S
from pdproxy.core.retry import Phase
from pdproxy.core.timeline import Stage, Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.instruments import ENDPOINTS, OTHER_MODEL
from pdproxy.runtime.metrics import MAX_MODELS, Metrics

CHAT = "/v1/chat/completions"


def streamed() -> Timeline:
    """The marks of a streamed request, a second apart."""
    timeline = Timeline(0.0)
    timeline.mark_received(0.0)
    timeline.mark_prefill_started(1.0)
    timeline.mark_prefill_done(2.0)
    timeline.mark_decode_started(3.0, is_stream=True)
    timeline.mark_content(4.0)
    timeline.mark_content(5.0)
    timeline.mark_finished(6.0)
    return timeline


class Rig:
    """Metrics over a fleet of one prefiller and one decoder."""

    def __init__(self) -> None:
        rng = random.Random(0)
        policies = {role: POLICIES["least_load"](role, rng) for role in Role}
        self.fleet = Fleet(LoadBoard(), policies, lambda: 0.0)
        self.p1 = self.add(Role.PREFILL, 1)
        self.d1 = self.add(Role.DECODE, 1)
        self.metrics = Metrics(self.fleet)

    def add(self, role, port):
        return self.fleet.add(role, Endpoint("h", port), state=State.ACTIVE)[0]

    def request(self, model="m", *, is_known=True, **fields):
        self.metrics.request_started(CHAT)
        timeline = fields.pop("made", None) or Timeline(0.0)
        made = Account("id", CHAT, "peer", timeline, model=model, is_model_known=is_known)
        for gap_s in fields.pop("gaps_s", ()):
            made.pulse.beat((timeline.last_content or 0.0) + gap_s, 1)
        for name, value in fields.items():
            setattr(made, name, value)
        self.metrics.request_finished(made)

    def everything(self):
        """Cause every series there is."""
        tokens = {"prompt_tokens": 3, "cached_tokens": 2, "output_tokens": 4, "rounds": 2}
        self.request(made=streamed(), is_stream=True, status=200, **tokens)
        self.request(outcome=Outcome.REJECTED, code="no_instance", status=503)
        self.request(outcome=Outcome.CLIENT_DISCONNECTED, status=499)
        for instance in (self.p1, self.d1):
            for outcome in ("success", "error", "abandoned"):
                self.metrics.attempt_finished(instance, outcome, 0.1, "lost")
            self.metrics.retried(instance.role, "lost")
            self.metrics.routed(instance.role, Reason.POLICY)
            self.metrics.failed_over(instance.role, Phase.CONNECT, "recovered")
        self.metrics.prefill_skipped("decode_only")
        self.metrics.ran_out(self.d1)
        self.metrics.recompute_ended(self.d1.label, "resumed")
        self.metrics.recomputed_tokens("m", 5)
        self.metrics.handle_missing(self.p1)
        self.metrics.handle_abandoned(self.p1, "released")
        self.metrics.prefill_reply_lost(self.p1)
        self.metrics.queue_changed(1)
        self.metrics.queue_left(0.5)

    def families(self):
        page = self.metrics.exposition()[0].decode()
        return {family.name: family for family in text_string_to_metric_families(page)}

    def samples(self, name):
        """Values by labels, in order of the labels' names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in self.families().values()
            for sample in family.samples
            if sample.name == name
        }

    def value(self, name, *labels):
        return self.samples(name).get(labels)


@pytest.fixture
def rig():
    return Rig()


# --- the page


def test_every_metric_has_help_and_a_good_name(rig):
    rig.everything()
    page = rig.metrics.exposition()[0].decode()

    for family in rig.families().values():
        assert f"# HELP {family.name}" in page
        assert family.documentation
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", family.name), family.name
        assert family.name.startswith(("pdproxy_", "process_", "python_")), family.name
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert all(name.endswith("_total") for name in names), names
        else:
            assert not any(name.endswith(("_total", "_created")) for name in names), names


def test_all_metrics_are_there_before_the_first_request(rig):
    before = set(rig.families())
    rig.everything()

    assert set(rig.families()) == before


def test_units_stand_in_the_names(rig):
    for name, family in rig.families().items():
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_bytes", "_attempts")), name


def test_labels_are_of_closed_sets(rig):
    rig.everything()
    allowed = {
        "endpoint",
        "model",
        "stream",
        "status_code",
        "outcome",
        "stage",
        "role",
        "instance",
        "state",
        "action",
        "reason",
        "policy",
        "phase",
        "result",
        "version",
        "le",
    }
    for family in rig.families().values():
        for sample in family.samples:
            if family.name.startswith("pdproxy_"):
                assert set(sample.labels) <= allowed, sample


# --- models


def test_client_cannot_make_series(rig):
    rig.request("good")
    before = len(rig.metrics.exposition()[0].splitlines())
    rig.request("bad-0", is_known=False)
    after_one = len(rig.metrics.exposition()[0].splitlines())

    for number in range(1000):
        rig.request(f"bad-{number}", is_known=False)

    assert len(rig.metrics.exposition()[0].splitlines()) == after_one
    assert after_one > before
    models = {labels[1] for labels in rig.samples("pdproxy_requests_total")}
    assert models == {"good", OTHER_MODEL}


def test_models_that_engines_took_are_named_up_to_a_limit(rig):
    for number in range(MAX_MODELS + 50):
        rig.request(f"m-{number}")

    models = {labels[1] for labels in rig.samples("pdproxy_requests_total")}
    assert len(models) == MAX_MODELS + 1
    assert OTHER_MODEL in models


def test_model_once_taken_keeps_its_name_in_failures(rig):
    rig.request("m")
    rig.request("m", is_known=False, outcome=Outcome.ENGINE_ERROR, status=502)

    assert rig.value("pdproxy_requests_total", CHAT, "m", "engine_error", "502", "false") == 1


# --- requests


def test_request_is_counted_once_and_in_flight_between(rig):
    rig.metrics.request_started(CHAT)
    assert rig.metrics.in_flight == 1
    assert rig.value("pdproxy_requests_in_flight", CHAT) == 1

    account = Account("id", CHAT, "peer", Timeline(0.0), model="m", is_model_known=True, status=200)
    rig.metrics.request_finished(account)

    assert rig.metrics.in_flight == 0
    assert rig.value("pdproxy_requests_in_flight", CHAT) == 0
    assert rig.value("pdproxy_requests_total", CHAT, "m", "success", "200", "false") == 1


def test_endpoints_begin_at_zero(rig):
    in_flight = rig.samples("pdproxy_requests_in_flight")

    assert in_flight == {(endpoint,): 0.0 for endpoint in ENDPOINTS}


def test_times_and_tokens_of_a_request(rig):
    rig.everything()

    assert rig.value("pdproxy_time_to_first_token_seconds_sum", CHAT, "m") == 4
    assert rig.value("pdproxy_time_per_output_token_seconds_sum", CHAT, "m") == pytest.approx(1 / 3)
    stages = rig.samples("pdproxy_stage_duration_seconds_sum")
    assert {stage: value for (_, stage), value in stages.items()} == {
        "queue": 1.0,
        "prefill": 1.0,
        "handoff": 1.0,
        "first_token": 1.0,
        "decode": 2.0,
    }
    durations = rig.samples("pdproxy_request_duration_seconds_sum")
    assert sum(stages.values()) == sum(durations.values()) == 6.0
    assert rig.value("pdproxy_overhead_seconds_sum", CHAT) == 2.0
    assert rig.value("pdproxy_prompt_tokens_total", "m") == 3
    assert rig.value("pdproxy_cached_prompt_tokens_total", "m") == 2
    assert rig.value("pdproxy_generation_tokens_total", "m") == 4


def test_requests_of_whose_output_nobody_tells_are_counted_by_endpoint(rig):
    name = "pdproxy_requests_without_usage_total"
    assert set(rig.samples(name).values()) == {0}

    rig.request(made=streamed(), is_stream=True)
    rig.request(made=streamed(), is_stream=True, output_tokens=3)
    rig.request(outcome=Outcome.ENGINE_ERROR, status=502)
    rig.request(made=streamed(), is_stream=True, outcome=Outcome.CLIENT_DISCONNECTED)
    rig.metrics.request_started("/v1/models")
    rig.metrics.request_finished(Account("id", "/v1/models", "peer", Timeline(0.0)))

    assert {labels for labels, count in rig.samples(name).items() if count} == {(CHAT,)}
    assert rig.value(name, CHAT) == 2


def test_answer_that_is_not_streamed_has_no_time_to_first_token(rig):
    rig.request(made=streamed(), is_stream=False)

    assert rig.samples("pdproxy_time_to_first_token_seconds_count") == {}
    assert rig.samples("pdproxy_inter_token_latency_seconds_count") == {}


def test_stages_of_several_prompts_at_once_are_not_told(rig):
    timeline = streamed()
    timeline.is_joint = True
    rig.request(made=timeline, is_stream=True)

    assert rig.samples("pdproxy_stage_duration_seconds_count") == {}
    assert rig.samples("pdproxy_overhead_seconds_count") == {}


def test_gaps_come_into_the_histogram_as_if_each_was_observed(rig):
    gaps_s = [1.0, 0.0078125, 0.015625, 0.25, 128.0]  # exact in binary
    rig.request("a", is_stream=True, gaps_s=gaps_s)
    expected = Histogram("x", "x", buckets=GAP_EDGES_S, registry=None)
    for gap_s in gaps_s[1:]:  # the first is the time to the first content
        expected.observe(gap_s)

    (family,) = expected.collect()
    name = "pdproxy_inter_token_latency_seconds"
    for sample in family.samples:
        labels = (CHAT, *sample.labels.values(), "a")
        value = rig.value(name + sample.name.removeprefix("x"), *labels)
        assert value == pytest.approx(sample.value), sample


def test_gaps_of_a_stream_that_runs_are_counted_once(rig):
    account = Account("id", CHAT, "p", Timeline(0.0), model="m", is_model_known=True)
    account.is_stream = True
    for now in (1.0, 2.0, 3.0):
        account.pulse.beat(now, 1)
    rig.metrics.pulse_full(account)
    assert rig.value("pdproxy_inter_token_latency_seconds_count", CHAT, "m") == 2

    account.pulse.beat(4.0, 1)
    rig.metrics.request_finished(account)

    assert rig.value("pdproxy_inter_token_latency_seconds_count", CHAT, "m") == 3
    assert rig.value("pdproxy_inter_token_latency_seconds_sum", CHAT, "m") == 3.0


def test_refusals_and_departures_are_counted_by_their_cause(rig):
    rig.request(outcome=Outcome.REJECTED, code="no_instance", status=503)
    timeline = Timeline(0.0)
    timeline.mark_received(0.0)
    rig.request(made=timeline, outcome=Outcome.CLIENT_DISCONNECTED, status=499)

    others = {("overloaded",): 0, ("queue_full",): 0, ("queue_timeout",): 0}
    assert rig.samples("pdproxy_rejected_total") == {("no_instance",): 1, **others}
    left = rig.samples("pdproxy_client_disconnects_total")
    assert {phase: count for (phase,), count in left.items() if count} == {"queue": 1}
    assert len(left) == len(Stage)


def test_every_outcome_of_a_model_begins_at_zero(rig):
    rig.request("m", status=200)

    outcomes = {labels[2] for labels in rig.samples("pdproxy_requests_total") if labels[1] == "m"}
    assert outcomes == {outcome.value for outcome in Outcome}


# --- instances


def test_attempts_and_their_errors_are_counted_by_instance(rig):
    rig.metrics.attempt_finished(rig.p1, "success", 0.5)
    rig.metrics.attempt_finished(rig.p1, "error", 0.5, "connect")

    attempts = rig.samples("pdproxy_upstream_requests_total")
    assert {labels for labels, count in attempts.items() if count} == {
        ("h:1", "success", "prefill"),
        ("h:1", "error", "prefill"),
    }
    assert len(attempts) == 6
    assert rig.samples("pdproxy_upstream_errors_total") == {("h:1", "connect", "prefill"): 1}


def test_state_and_load_are_read_from_the_fleet(rig):
    with (
        rig.fleet.lease(Role.PREFILL, Cost(compute_tokens=7, kv_tokens=2)),
        rig.fleet.lease(Role.DECODE, Cost(kv_tokens=9)),
    ):
        assert rig.samples("pdproxy_instance_load_tokens") == {
            ("h:1", "prefill"): 7,
            ("h:1", "decode"): 9,
        }
        assert rig.value("pdproxy_instance_kv_tokens", "h:1", "prefill") == 2
        assert rig.value("pdproxy_instance_requests_in_flight", "h:1", "decode") == 1

    rig.fleet.report_failure(rig.d1, certain=True)
    assert rig.samples("pdproxy_instance_up") == {("h:1", "prefill"): 1, ("h:1", "decode"): 0}
    states = rig.samples("pdproxy_instance_state")
    assert {labels for labels, value in states.items() if value} == {
        ("h:1", "prefill", "active"),
        ("h:1", "decode", "ejected"),
    }
    assert not any(labels[2] == "gone" for labels in states)


def test_use_of_the_kv_cache_is_told_where_its_size_is_known(rig):
    assert rig.samples("pdproxy_instance_kv_usage_ratio") == {}

    rig.fleet.set_capacity(rig.d1, 200)
    with rig.fleet.lease(Role.DECODE, Cost(kv_tokens=150)):
        assert rig.samples("pdproxy_instance_kv_usage_ratio") == {("h:1", "decode"): 0.75}
    assert rig.samples("pdproxy_instance_kv_capacity_tokens") == {("h:1", "decode"): 200}


def test_who_may_get_requests_is_counted_per_role(rig):
    rig.add(Role.DECODE, 2)
    rig.fleet.set_state(rig.p1, State.GONE)

    available = rig.samples("pdproxy_instances_available")
    assert available == {("prefill",): 0, ("decode",): 2}


def test_those_known_to_be_dead_are_not_counted_though_requests_try_them(rig):
    rig.fleet.report_failure(rig.d1, certain=True)

    assert rig.value("pdproxy_instances_available", "decode") == 0
    with rig.fleet.lease(Role.DECODE, Cost()) as lease:
        assert lease.instance is rig.d1


def test_format_is_the_one_that_the_scraper_asks_for(rig):
    plain, plain_type = rig.metrics.exposition("text/plain")
    asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    openmetrics, openmetrics_type = rig.metrics.exposition(asked)

    assert plain_type.startswith("text/plain; version=0.0.4")
    assert openmetrics_type.startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.endswith(b"# EOF\n")
    assert not plain.endswith(b"# EOF\n")


async def test_scrape_of_64_instances_is_quick_and_holds_up_the_loop_for_less(rig):
    for role in Role:
        for port in range(2, 33):
            rig.fleet.set_capacity(rig.add(role, port), 1000)
    for model in ("a", "b", "c"):
        rig.request(model, is_stream=True, status=200)
    await rig.metrics.scrape("")

    scrapes_s = [await duration_s(lambda: rig.metrics.scrape("")) for _ in range(10)]
    loop_s = []
    for _ in range(10):
        began = time.process_time()
        rig.metrics.prepare()
        loop_s.append(time.process_time() - began)

    # CPU time, and the least of several: what else runs on the machine is not what is measured.
    assert min(scrapes_s) < 0.05
    assert min(loop_s) < 0.005


async def duration_s(call):
    began = time.process_time()
    await call()
    return time.process_time() - began


async def test_two_scrapes_at_once_are_both_whole(rig):
    rig.everything()
    rig.fleet.set_state(rig.d1, State.GONE)

    pages = await asyncio.gather(*(rig.metrics.scrape("") for _ in range(4)))

    assert {page for page, _ in pages if b'role="decode",instance="h:1"' in page} == set()


@pytest.mark.parametrize("role", list(Role))
def test_series_of_removed_instances_are_gone(rig, role):
    rig.everything()
    removed = rig.p1 if role is Role.PREFILL else rig.d1
    rig.fleet.set_state(removed, State.GONE)

    left = {
        (sample.labels.get("role"), sample.labels["instance"])
        for family in rig.families().values()
        for sample in family.samples
        if "instance" in sample.labels
    }
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert left == {(other.value, "h:1"), (None, "h:1")}  # one address, still known


def test_nothing_is_left_of_an_address_that_is_gone(rig):
    rig.everything()
    rig.fleet.set_state(rig.p1, State.GONE)
    rig.fleet.set_state(rig.d1, State.GONE)

    assert b"h:1" not in rig.metrics.exposition()[0]


def test_two_pages_of_one_process_do_not_mix():
    first, second = Rig(), Rig()
    first.request()

    assert second.value("pdproxy_requests_total", CHAT, "m", "success", "0", "false") is None
