"""Slow start: a share that grows with time, whatever the policy."""

import random
from collections import Counter

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.health import HealthRules
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.ramp import Ramp

D = Role.DECODE


@pytest.mark.parametrize(
    ("now_s", "share"), [(100, 0.1), (100.5, 0.1), (105, 0.5), (109.9, 0.99), (110, 1), (1e9, 1)]
)
def test_share_grows_with_time(now_s, share):
    assert Ramp(100.0, 10.0).share(now_s) == pytest.approx(share)


def test_without_a_duration_the_share_is_whole_at_once():
    assert Ramp(100.0, 0.0).share(100.0) == 1.0


@pytest.mark.parametrize(
    ("share", "count", "expected"), [(0.1, 2, 11), (0.5, 2, 51), (0.5, 4, 26), (1.0, 2, 100)]
)
def test_it_takes_part_in_twice_its_even_share_of_choices(share, count, expected):
    ramp = Ramp(0.0, 10.0)

    assert sum(ramp.takes_part(share, count) for _ in range(100)) == pytest.approx(expected, abs=1)


def test_it_takes_part_in_the_first_choice():
    assert Ramp(0.0, 10.0).takes_part(0.1, 100)


class Rig:
    def __init__(self, policy="least_load"):
        self.now_s = 0.0
        policies = {role: POLICIES[policy](role, random.Random(1)) for role in Role}
        rules = HealthRules(slow_start_s=10.0)
        self.fleet = Fleet(LoadBoard(), policies, lambda: self.now_s, rules)
        self.old = self.fleet.add(D, Endpoint("h", 1), state=State.ACTIVE)[0]
        self.new = self.fleet.add(D, Endpoint("h", 2))[0]

    def served(self, count=100):
        """Lease so many and hold them, as streams are held."""
        return Counter(self.fleet.lease(D, Cost(kv_tokens=100)).instance for _ in range(count))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_new_instance_is_not_flooded_whatever_the_policy(policy):
    rig = Rig(policy)
    rig.served(50)
    rig.fleet.admit(rig.new)

    assert 1 <= rig.served()[rig.new] <= 15


def test_new_instance_catches_up_and_then_takes_its_full_share():
    rig = Rig()
    rig.served(50)
    rig.fleet.admit(rig.new)
    for _ in range(10):
        rig.served(20)
        rig.now_s += 1

    loads = {rig.fleet.load(instance).requests for instance in (rig.old, rig.new)}
    assert max(loads) - min(loads) <= 80
    rig.now_s = 10.0
    assert rig.served(20)[rig.new] >= 10


def test_warm_instance_takes_its_full_share_at_once():
    rig = Rig()
    rig.fleet.judge.probe_succeeded(rig.new, is_warm=True)

    assert rig.served()[rig.new] == 50


def test_returning_instance_starts_slowly_and_an_ejected_one_has_no_ramp():
    rig = Rig()
    rig.fleet.judge.probe_succeeded(rig.new, is_warm=True)
    rig.fleet.report_failure(rig.new, certain=True)
    rig.now_s = 5.0
    rig.fleet.admit(rig.new)

    assert rig.served()[rig.new] <= 15
    rig.fleet.report_failure(rig.new, certain=True)
    member = rig.fleet.members.get(rig.new)
    assert member is not None
    assert member.ramp is None


def test_instances_that_all_start_slowly_share_all_requests():
    rig = Rig()
    rig.fleet.admit(rig.new)
    rig.fleet.report_failure(rig.old, certain=True)
    rig.now_s = 1.0
    rig.fleet.admit(rig.old)

    assert sum(rig.served().values()) == 100


def test_avoided_instance_is_not_chosen_because_the_other_starts_slowly():
    rig = Rig()
    rig.fleet.admit(rig.new)

    for _ in range(20):
        assert rig.fleet.lease(D, Cost(), avoid=[rig.old]).instance is rig.new
