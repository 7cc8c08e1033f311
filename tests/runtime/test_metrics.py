"""Names, labels from closed sets, and what the page says of requests and instances."""

from __future__ import annotations

import random
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.metrics import ENDPOINTS, MAX_MODELS, OTHER_MODEL, Metrics

CHAT = "/v1/chat/completions"


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
        made = Account("id", CHAT, "peer", Timeline(0.0), model=model, is_model_known=is_known)
        for name, value in fields.items():
            setattr(made, name, value)
        self.metrics.request_finished(made)

    def everything(self):
        """Cause every series there is."""
        timeline = Timeline(0.0)
        for now, name in enumerate(
            (
                "prefill_started",
                "prefill_done",
                "decode_started",
                "first_event",
                "first_content",
                "last_content",
                "finished",
            )
        ):
            getattr(timeline, f"mark_{name}")(float(now))
        tokens = {"prompt_tokens": 3, "cached_tokens": 2, "output_tokens": 4}
        self.request(timeline=timeline, is_stream=True, status=200, **tokens)
        for instance in (self.p1, self.d1):
            for outcome in ("success", "error", "abandoned"):
                self.metrics.attempt_finished(instance, outcome, 0.1, "lost")
            self.metrics.retried(instance.role, "lost")
        self.metrics.handle_missing(self.p1)
        self.metrics.handle_abandoned(self.p1)

    def families(self):
        page = self.metrics.exposition().decode()
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
    page = rig.metrics.exposition().decode()

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
        "reason",
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
    before = len(rig.metrics.exposition().splitlines())
    rig.request("bad-0", is_known=False)
    after_one = len(rig.metrics.exposition().splitlines())

    for number in range(1000):
        rig.request(f"bad-{number}", is_known=False)

    assert len(rig.metrics.exposition().splitlines()) == after_one
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
    assert {labels[1] for labels in stages} == {"prefill", "handoff", "first_token", "decode"}
    assert set(stages.values()) == {1.0, 2.0}
    assert rig.value("pdproxy_prompt_tokens_total", "m") == 3
    assert rig.value("pdproxy_cached_prompt_tokens_total", "m") == 2
    assert rig.value("pdproxy_generation_tokens_total", "m") == 4


def test_sums_never_go_down_whatever_the_order_of_marks(rig):
    timeline = Timeline(0.0)
    timeline.mark_prefill_done(9.0)
    timeline.mark_first_content(2.0)
    timeline.mark_decode_started(8.0)
    rig.request(timeline=timeline)

    sums = [
        sample
        for family in rig.families().values()
        for sample in family.samples
        if sample.name.endswith("_sum")
    ]
    assert all(sample.value >= 0 for sample in sums), sums


# --- instances


def test_attempts_and_their_errors_are_counted_by_instance(rig):
    rig.metrics.attempt_finished(rig.p1, "success", 0.5)
    rig.metrics.attempt_finished(rig.p1, "error", 0.5, "connect")

    attempts = rig.samples("pdproxy_upstream_requests_total")
    assert attempts == {("h:1", "success", "prefill"): 1, ("h:1", "error", "prefill"): 1}
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

    assert b"h:1" not in rig.metrics.exposition()


def test_two_pages_of_one_process_do_not_mix():
    first, second = Rig(), Rig()
    first.request()

    assert second.value("pdproxy_requests_total", CHAT, "m", "success", "0", "false") is None
