"""Invariant 3: a joining, draining or gone instance gets no new lease, nor an ejected one beside
an active one."""

from __future__ import annotations

import random

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.errors import NoInstance

OUT = [State.JOINING, State.DRAINING, State.GONE, State.EJECTED]


def fleet_with(policy: str, role: Role, state: State):
    """A fleet of one instance in `state`, which holds a lease so that it can drain."""
    policies = {each: POLICIES[policy](each, random.Random(0)) for each in Role}
    fleet = Fleet(LoadBoard(), policies, lambda: 0.0)
    start = State.JOINING if state is State.JOINING else State.ACTIVE
    instance, _ = fleet.add(role, Endpoint("h", 1), state=start)
    lease = None
    if state is not State.JOINING:
        lease = fleet.lease(role, Cost())
        fleet.set_state(instance, state)
    return fleet, instance, lease


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("state", OUT)
def test_active_ones_get_all_leases(policy, role, state):
    fleet, out, _ = fleet_with(policy, role, state)
    active, _ = fleet.add(role, Endpoint("h", 2), state=State.ACTIVE)

    for _ in range(50):
        assert fleet.lease(role, Cost()).instance is active
        assert fleet.lease(role, Cost(), avoid=[active]).instance is active
    assert fleet.state(out) is state


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("state", [state for state in OUT if state is not State.EJECTED])
def test_there_is_no_lease_when_there_is_nobody_else(policy, state):
    fleet, _, _ = fleet_with(policy, Role.DECODE, state)

    with pytest.raises(NoInstance):
        fleet.lease(Role.DECODE, Cost())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ejected_ones_are_better_than_nobody(policy):
    fleet, ejected, _ = fleet_with(policy, Role.DECODE, State.EJECTED)

    assert fleet.lease(Role.DECODE, Cost()).instance is ejected
