"""Who gets a lease, what it charges, and how instances come and go under live leases."""

import random
from collections import Counter

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.health import HealthRules
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import NO_LOAD, Cost, Load, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.record import EngineReport
from pdproxy.errors import NoInstance

COST = Cost(compute_tokens=1000, kv_tokens=1200, body_bytes=4000)
HELD = Load(1, 1000, 1200, 4000)
P, D = Role.PREFILL, Role.DECODE


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    return make_fleet(clock=clock)


def make_fleet(policy="least_load", clock=lambda: 0.0, seed=1):
    policies = {role: POLICIES[policy](role, random.Random(seed)) for role in Role}
    return Fleet(LoadBoard(), policies, clock, HealthRules(failures_to_eject=3, ejection_s=1.0))


def add(fleet, text, role=D, state=State.ACTIVE):
    return fleet.add(role, Endpoint.parse(text), state=state)[0]


# --- membership


@pytest.mark.case("C57", "C85")
@pytest.mark.parametrize("alias", ["127.0.0.1:8100", "0.0.0.0:8100", "LOCALHOST:8100"])
def test_known_address_is_not_registered_again_and_keeps_its_first_name(fleet, alias):
    first = add(fleet, "localhost:8100")

    again, is_new = fleet.add(D, Endpoint.parse(alias))

    assert (again, is_new) == (first, False)
    assert [instance.label for instance in fleet.instances(D)] == ["localhost:8100"]
    assert fleet.find(D, Endpoint.parse(alias)) is first
    assert fleet.state(first) is State.ACTIVE


@pytest.mark.case("C57")
def test_look_alikes_are_instances_of_their_own(fleet):
    names = ["localhost:1", "localhost.lab:1", "my-localhost:1", "127.0.0.10:1", "127.0.0.11:1"]
    for name in names:
        add(fleet, name)

    assert [instance.label for instance in fleet.instances(D)] == names


@pytest.mark.case("C59")
def test_one_address_in_both_roles_is_two_instances(fleet):
    prefiller = add(fleet, "h:8100", P, State.JOINING)
    decoder = add(fleet, "h:8100", D, State.JOINING)
    assert prefiller.slot != decoder.slot

    fleet.set_state(prefiller, State.DRAINING)

    assert fleet.instances(P) == ()
    assert fleet.instances(D) == (decoder,)


def test_instances_are_listed_in_order_of_registration_whatever_their_state(fleet):
    added = [add(fleet, f"h:{port}", state=State.JOINING) for port in (3, 1, 2)]
    fleet.set_state(added[1], State.ACTIVE)
    fleet.set_state(added[2], State.EJECTED)

    assert list(fleet.instances(D)) == added
    assert fleet.counts(D) == {
        State.JOINING: 1,
        State.ACTIVE: 1,
        State.DRAINING: 0,
        State.EJECTED: 1,
    }


def test_state_that_the_table_forbids_is_refused_and_nothing_changes(fleet):
    one = add(fleet, "h:1")

    with pytest.raises(ValueError, match="h:1 cannot go from active to joining"):
        fleet.set_state(one, State.JOINING)

    assert fleet.state(one) is State.ACTIVE


def test_gone_instance_is_forgotten_and_stays_so(fleet):
    one = add(fleet, "h:1")
    fleet.set_state(one, State.DRAINING)

    assert fleet.state(one) is State.GONE
    assert fleet.find(D, one.endpoint) is None
    assert fleet.load(one) == NO_LOAD
    assert fleet.capacity_tokens(one) is None
    assert not fleet.admit(one)
    assert not fleet.report_failure(one, certain=True)
    fleet.report_success(one)
    fleet.set_capacity(one, 1)
    fleet.set_state(one, State.GONE)
    with pytest.raises(ValueError, match="cannot go from gone"):
        fleet.set_state(one, State.ACTIVE)


def test_age_of_a_state_starts_with_it(fleet, clock):
    one = add(fleet, "h:1", state=State.JOINING)
    clock.now_s = 5.0
    fleet.set_state(one, State.ACTIVE)
    clock.now_s = 7.0

    assert fleet.state_age_s(one) == 2.0


# --- draining


@pytest.mark.case("C52")
def test_draining_instances_get_no_new_lease_even_if_nothing_else_is_left(fleet):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")
    leases = [fleet.lease(D, COST), fleet.lease(D, COST)]
    fleet.set_state(one, State.DRAINING)
    fleet.set_state(other, State.DRAINING)

    with pytest.raises(NoInstance, match="no decode instance is available"):
        fleet.lease(D, COST)
    assert {fleet.state(one), fleet.state(other)} == {State.DRAINING}
    third = add(fleet, "h:3")
    assert fleet.lease(D, COST).instance is third
    for lease in leases:
        lease.close()
    assert fleet.instances(D) == (third,)


@pytest.mark.parametrize("state", [State.JOINING])
def test_joining_instance_gets_no_lease(fleet, state):
    add(fleet, "h:1", state=state)

    with pytest.raises(NoInstance):
        fleet.lease(D, COST)


def test_draining_instance_is_gone_with_its_last_lease(fleet):
    one = add(fleet, "h:1")
    first, last = fleet.lease(D, COST), fleet.lease(D, COST)
    fleet.set_state(one, State.DRAINING)

    first.close()
    assert fleet.state(one) is State.DRAINING
    last.close()

    assert fleet.state(one) is State.GONE
    assert fleet.instances(D) == ()


@pytest.mark.case("C50", "C53")
def test_readded_draining_instance_is_active_with_slot_and_load_it_has(fleet):
    one = add(fleet, "h:1")
    stream = fleet.lease(D, COST)
    fleet.set_state(one, State.DRAINING)

    again, is_new = fleet.add(D, Endpoint.parse("h:1"))

    assert (again, is_new) == (one, False)
    assert fleet.state(one) is State.ACTIVE
    assert fleet.load(one) == HELD
    stream.close()
    assert fleet.load(one) == NO_LOAD
    assert fleet.instances(D) == (one,)


@pytest.mark.case("C50")
def test_completion_after_forced_removal_does_not_touch_the_new_registration(fleet):
    old = add(fleet, "h:1")
    stream = fleet.lease(D, COST)
    fleet.set_state(old, State.GONE)
    new = add(fleet, "h:1")
    assert new is not old
    assert new.slot != old.slot
    assert fleet.load(old) == HELD
    other = fleet.lease(D, COST)

    stream.close()

    assert fleet.load(new) == HELD
    assert fleet.load(old) == NO_LOAD
    other.close()
    assert fleet.load(new) == NO_LOAD
    assert add(fleet, "h:2").slot == old.slot


def test_new_registration_after_a_drain_is_another_instance(fleet):
    old = add(fleet, "h:1")
    fleet.set_state(old, State.DRAINING)

    new, is_new = fleet.add(D, Endpoint.parse("h:1"))

    assert is_new
    assert new.serial != old.serial
    assert fleet.state(new) is State.JOINING


# --- leases


def test_lease_charges_while_it_lives(fleet):
    one = add(fleet, "h:1")

    with fleet.lease(D, COST) as lease:
        assert lease.instance is one
        assert lease.cost == COST
        assert fleet.load(one) == HELD

    assert lease.cost is None
    assert fleet.load(one) == NO_LOAD


def test_lease_is_released_when_its_block_raises(fleet):
    one = add(fleet, "h:1")

    with pytest.raises(KeyError), fleet.lease(D, COST):
        raise KeyError

    assert fleet.load(one) == NO_LOAD


@pytest.mark.case("C47")
def test_closing_twice_releases_once(fleet):
    one = add(fleet, "h:1")
    other = fleet.lease(D, COST)
    lease = fleet.lease(D, COST)

    lease.close()
    lease.close()

    assert fleet.load(one) == HELD
    other.close()


def test_recharge_replaces_the_charge_and_a_closed_lease_stays_closed(fleet):
    one = add(fleet, "h:1")
    lease = fleet.lease(D, COST)

    lease.recharge(Cost(requests=1, kv_tokens=50))
    assert fleet.load(one) == Load(1, 0, 50, 0)
    lease.close()
    lease.recharge(COST)

    assert fleet.load(one) == NO_LOAD


@pytest.mark.case("C47")
def test_recharge_never_shows_less_than_what_others_hold():
    shown = []

    class WatchedBoard(LoadBoard):
        def charge(self, slot, cost):  # type: ignore[explicit-override]  # new in 3.12
            super().charge(slot, cost)
            shown.append(self.load(slot))

        def release(self, slot, cost):  # type: ignore[explicit-override]  # new in 3.12
            super().release(slot, cost)
            shown.append(self.load(slot))

    policies = {role: POLICIES["least_load"](role, random.Random(1)) for role in Role}
    fleet = Fleet(WatchedBoard(), policies, lambda: 0.0)
    add(fleet, "h:1")
    with fleet.lease(D, COST), fleet.lease(D, COST) as lease:
        shown.clear()
        lease.recharge(Cost(kv_tokens=5))
        lease.recharge(COST)

        assert all(load.requests >= 2 and load.kv_tokens >= 1200 for load in shown)


@pytest.mark.parametrize("cost", [Cost(requests=0), Cost(requests=0, kv_tokens=5)])
def test_slot_is_kept_for_a_lease_that_charges_nothing(fleet, cost):
    one = add(fleet, "h:1")
    lease = fleet.lease(D, COST)
    lease.recharge(cost)

    fleet.set_state(one, State.DRAINING)
    other = add(fleet, "h:2")
    lease.recharge(COST)

    assert fleet.load(other) == NO_LOAD
    assert fleet.load(one) == HELD
    lease.close()
    assert fleet.state(one) is State.GONE


@pytest.mark.case("C48")
def test_next_prompt_goes_to_the_prefiller_that_has_handed_over(fleet):
    add(fleet, "p:1", P)
    add(fleet, "p:2", P)
    computing = fleet.lease(P, COST)
    handed_over = fleet.lease(P, COST)
    handed_over.recharge(Cost(requests=1, kv_tokens=1000))

    assert computing.instance is not handed_over.instance
    assert fleet.lease(P, COST).instance is handed_over.instance


@pytest.mark.case("C49")
@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "reference", "round_robin"])
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("seed", range(3))
def test_sequential_requests_spread_over_equal_instances(policy, role, seed):
    fleet = make_fleet(policy, seed=seed)
    served = Counter({add(fleet, f"h:{port}", role): 0 for port in (1, 2, 3)})

    for _ in range(100):
        with fleet.lease(role, COST) as lease:
            served[lease.instance] += 1

    assert all(25 <= count <= 42 for count in served.values())


@pytest.mark.case("C49")
@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "reference"])
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("cost", [COST, Cost(body_bytes=1)], ids=["estimated", "unestimated"])
def test_two_in_flight_are_never_on_one_instance_while_another_is_idle(policy, role, cost):
    fleet = make_fleet(policy)
    served = Counter({add(fleet, f"h:{port}", role): 0 for port in (1, 2, 3)})
    rng = random.Random(5)
    running = [fleet.lease(role, cost)]

    for _ in range(200):
        running.append(fleet.lease(role, cost))
        assert running[0].instance is not running[1].instance
        served[running[1].instance] += 1
        running.pop(rng.randrange(2)).close()

    assert all(50 <= count <= 84 for count in served.values())


# --- avoid, ejection, panic


@pytest.mark.case("C58")
def test_avoided_instance_gets_nothing_while_another_is_available(fleet):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")

    for _ in range(20):
        assert fleet.lease(D, COST, avoid=[one]).instance is other


@pytest.mark.parametrize("state_of_other", [State.JOINING, State.EJECTED, State.DRAINING])
def test_avoid_is_ignored_when_no_other_is_available(fleet, state_of_other):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")
    with fleet.lease(D, COST, avoid=[one]):
        if state_of_other is State.JOINING:
            fleet.set_state(other, State.GONE)
            add(fleet, "h:2", state=State.JOINING)
        else:
            fleet.set_state(other, state_of_other)

        assert fleet.available(D, avoid=[one]) == [one]
        assert fleet.lease(D, COST, avoid={one}).instance is one


def test_ejected_instance_gets_nothing_while_one_is_active(fleet):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")

    assert fleet.report_failure(one, certain=True)

    assert fleet.available(D) == [other]
    assert {fleet.lease(D, COST).instance for _ in range(10)} == {other}


def test_ejected_instances_are_used_when_no_active_one_is_left(fleet):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")
    add(fleet, "h:3", state=State.JOINING)
    fleet.report_failure(one, certain=True)
    fleet.report_failure(other, certain=True)

    assert fleet.available(D) == [one, other]
    assert fleet.ready_count(D) == 0
    assert fleet.available(D, avoid=[other]) == [one]
    assert fleet.lease(D, COST, avoid=[other]).instance is one


def test_uncertain_failures_eject_after_some_in_a_row(fleet):
    one = add(fleet, "h:1")

    results = [fleet.report_failure(one, certain=False) for _ in range(2)]
    fleet.report_success(one)
    results += [fleet.report_failure(one, certain=False) for _ in range(3)]

    assert results == [False] * 4 + [True]
    assert fleet.state(one) is State.EJECTED


def test_reports_on_an_instance_that_is_not_active_change_nothing(fleet):
    one = add(fleet, "h:1")
    fleet.lease(D, COST)
    fleet.report_failure(one, certain=True)

    fleet.report_success(one)
    assert not fleet.report_failure(one, certain=True)
    assert fleet.state(one) is State.EJECTED
    fleet.set_state(one, State.DRAINING)
    assert not fleet.report_failure(one, certain=True)
    assert fleet.state(one) is State.DRAINING


@pytest.mark.case("C51")
def test_ejection_and_return_leave_the_load_alone(fleet, clock):
    one = add(fleet, "h:1")
    stream = fleet.lease(D, COST)

    fleet.report_failure(one, certain=True)
    assert fleet.load(one) == HELD
    clock.now_s = 10.0
    assert fleet.admit(one)
    assert fleet.load(one) == HELD

    stream.close()
    assert fleet.load(one) == NO_LOAD


def test_probe_admits_what_is_joining_or_whose_ejection_is_over(fleet, clock):
    one = add(fleet, "h:1", state=State.JOINING)
    assert fleet.admit(one)
    assert not fleet.admit(one)
    fleet.report_failure(one, certain=True)

    assert not fleet.admit(one)
    clock.now_s = 1.0
    assert fleet.admit(one)
    assert fleet.state(one) is State.ACTIVE


def test_probe_that_ends_after_a_removal_does_not_undo_it(fleet):
    one = add(fleet, "h:1")
    stream = fleet.lease(D, COST)
    fleet.set_state(one, State.DRAINING)

    assert not fleet.admit(one)

    assert fleet.state(one) is State.DRAINING
    stream.close()


# --- capacity


def test_capacity_reaches_the_policy(fleet):
    full, roomy = add(fleet, "h:1"), add(fleet, "h:2")
    fleet.set_capacity(full, 1000)
    fleet.set_capacity(roomy, 100_000)

    assert fleet.capacity_tokens(full) == 1000
    assert {fleet.lease(D, COST).instance for _ in range(5)} == {roomy}
    fleet.set_capacity(full, None)
    assert fleet.capacity_tokens(full) is None
    assert fleet.lease(D, COST).instance is full


def test_reported_capacity_is_counted_as_the_load_is_where_requests_share(fleet):
    one = add(fleet, "h:1")
    report = EngineReport(capacity_tokens=1000, kv_usage=0.25)
    fleet.judge.engine_reported(one, report, 0)
    assert fleet.capacity_tokens(one) == 1000

    for _ in range(30):
        fleet.judge.engine_reported(one, report, 1000)

    assert fleet.capacity_tokens(one) == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize("how", ["request", "probe"])
def test_what_an_engine_said_of_its_work_is_not_told_of_a_dead_one(fleet, how):
    one = add(fleet, "h:1")
    report = EngineReport(capacity_tokens=1000, kv_usage=0.25, running=2, waiting=0)
    fleet.judge.engine_reported(one, report)
    assert fleet.engine_report(one) == report

    if how == "request":
        fleet.report_failure(one, certain=True)
    else:
        fleet.judge.probe_failed(one, certain=True, why="refused")

    assert fleet.engine_report(one) == EngineReport(capacity_tokens=1000)
    assert fleet.capacity_tokens(one) == 1000


def test_nothing_is_told_of_an_engine_that_says_nothing_or_is_gone(fleet):
    one = add(fleet, "h:1")
    fleet.judge.engine_silent(one)
    assert fleet.engine_report(one) == EngineReport()
    fleet.judge.engine_reported(one, EngineReport(running=2))
    fleet.set_state(one, State.GONE)

    fleet.judge.engine_silent(one)
    assert fleet.engine_report(one) == EngineReport()


def test_roles_are_apart(fleet):
    add(fleet, "h:1", P)

    with pytest.raises(NoInstance, match="decode"):
        fleet.lease(D, COST)
    assert fleet.lease(P, COST).instance.role is P


# --- panic


def test_when_more_than_half_are_ejected_those_that_may_live_serve(fleet):
    refused, failing, other, well = [add(fleet, f"h:{port}") for port in range(1, 5)]
    fleet.report_failure(refused, certain=True)
    for _ in range(3):
        fleet.report_failure(failing, certain=False)
    assert fleet.available(D) == [other, well]
    assert not fleet.members.is_panicking(D)

    for _ in range(3):
        fleet.report_failure(other, certain=False)

    assert set(fleet.available(D)) == {failing, other, well}
    assert fleet.members.is_panicking(D)


def test_in_panic_a_good_probe_brings_back_before_the_ejection_is_over(fleet):
    one, other = add(fleet, "h:1"), add(fleet, "h:2")
    third = add(fleet, "h:3")
    for instance in (one, other):
        fleet.report_failure(instance, certain=True)
    assert fleet.available(D) == [third]
    assert fleet.ready_count(D) == 1

    assert not fleet.judge.probe_succeeded(one)
    assert set(fleet.available(D)) == {one, third}
    assert fleet.ready_count(D) == 2
    fleet.judge.probe_failed(one, certain=True, why="refused")

    assert fleet.available(D) == [third]


def test_the_last_of_a_role_counts_as_ready_again_with_its_first_good_probe(fleet):
    one = add(fleet, "h:1")
    for _ in range(3):
        fleet.report_failure(one, certain=False)
    assert fleet.ready_count(D) == 1, "it fails, but it is there"

    fleet.judge.probe_failed(one, certain=True, why="refused")
    assert (fleet.available(D), fleet.ready_count(D)) == ([one], 0)
    fleet.judge.probe_succeeded(one)

    assert (fleet.available(D), fleet.ready_count(D)) == ([one], 1)


def test_failed_probes_eject_an_active_instance(fleet, clock):
    one = add(fleet, "h:1")

    found = [fleet.judge.probe_failed(one, certain=False, why="silent") for _ in range(3)]
    assert found == [False, False, True]
    assert fleet.state(one) is State.EJECTED
    clock.now_s = 1.0
    assert fleet.judge.probe_succeeded(one)

    assert not fleet.judge.probe_failed(one, certain=False, why="silent")


def test_every_change_of_a_state_is_told(fleet):
    told = []
    fleet.members.on_move(lambda member, was: told.append((str(was), str(member.state))))
    one = add(fleet, "h:1", state=State.JOINING)

    fleet.admit(one)
    fleet.report_failure(one, certain=True)
    fleet.set_state(one, State.DRAINING)

    assert told == [("joining", "active"), ("active", "ejected"), ("ejected", "gone")]
