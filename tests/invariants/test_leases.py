"""Whatever happens in whatever order, load is the sum of the live leases."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import TRANSITIONS, Endpoint, Role, State
from pdproxy.core.load import NO_LOAD, Cost, Load, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.errors import NoInstance

AMOUNTS = st.integers(0, 100_000)
COSTS = st.builds(
    Cost, requests=st.integers(0, 2), compute_tokens=AMOUNTS, kv_tokens=AMOUNTS, body_bytes=AMOUNTS
)
PORTS = st.integers(1, 4)
ROLES = st.sampled_from(Role)
INDEXES = st.integers(0, 1_000_000)


class FleetModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.seen = []  # every instance ever registered
        self.leases = []  # live ones with the cost they charge
        self.now_s = 0.0

    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=INDEXES)
    def start(self, policy, seed):
        policies = {role: POLICIES[policy](role, random.Random(seed)) for role in Role}
        self.fleet = Fleet(LoadBoard(), policies, lambda: self.now_s)

    @rule(role=ROLES, port=PORTS, state=st.sampled_from([State.JOINING, State.ACTIVE]))
    def add(self, role, port, state):
        known = self.fleet.find(role, Endpoint("h", port))
        was_draining = known is not None and self.fleet.state(known) is State.DRAINING

        instance, is_new = self.fleet.add(role, Endpoint("h", port), state=state)

        assert is_new == (known is None)
        if is_new:
            assert instance not in self.seen
            self.seen.append(instance)
        else:
            assert instance is known
            assert not was_draining or self.fleet.state(instance) is State.ACTIVE

    @precondition(lambda self: self.seen)
    @rule(index=INDEXES, state=st.sampled_from(State))
    def set_state(self, index, state):
        instance = self.seen[index % len(self.seen)]
        if state in TRANSITIONS[self.fleet.state(instance)]:
            self.fleet.set_state(instance, state)

    @precondition(lambda self: self.seen)
    @rule(index=INDEXES, certain=st.booleans())
    def fail(self, index, certain):
        self.fleet.report_failure(self.seen[index % len(self.seen)], certain=certain)

    @precondition(lambda self: self.seen)
    @rule(index=INDEXES, later_s=st.floats(0, 5))
    def probe(self, index, later_s):
        self.now_s += later_s
        self.fleet.admit(self.seen[index % len(self.seen)])

    @precondition(lambda self: self.seen)
    @rule(index=INDEXES, tokens=st.none() | st.integers(1, 100_000))
    def learn_capacity(self, index, tokens):
        self.fleet.set_capacity(self.seen[index % len(self.seen)], tokens)

    @rule(role=ROLES, cost=COSTS, avoided=st.lists(INDEXES, max_size=2))
    def lease(self, role, cost, avoided):
        avoid = [self.seen[index % len(self.seen)] for index in avoided if self.seen]
        states = {instance: self.fleet.state(instance) for instance in self.fleet.instances(role)}
        active = [i for i, state in states.items() if state is State.ACTIVE]
        ejected = [i for i, state in states.items() if state is State.EJECTED]
        members = self.fleet.members.of_role(role)
        dead = {member.instance for member in members if member.health.is_dead}
        living = [i for i in ejected if i not in dead]
        allowed = (active if len(ejected) <= len(active) else active + living) or ejected
        try:
            lease = self.fleet.lease(role, cost, avoid=avoid)
        except NoInstance:
            assert not allowed
            return
        assert lease.instance in allowed
        assert lease.instance not in avoid or set(allowed) <= set(avoid)
        self.leases.append([lease, cost])

    @precondition(lambda self: self.leases)
    @rule(index=INDEXES, cost=COSTS)
    def recharge(self, index, cost):
        entry = self.leases[index % len(self.leases)]
        entry[0].recharge(cost)
        entry[1] = cost

    @precondition(lambda self: self.leases)
    @rule(index=INDEXES)
    def close(self, index):
        lease, _ = self.leases.pop(index % len(self.leases))
        lease.close()
        lease.close()

    @invariant()
    def load_is_the_sum_of_live_leases(self):
        for instance in self.seen:
            costs = [cost for lease, cost in self.leases if lease.instance is instance]
            assert self.fleet.load(instance) == Load(
                sum(cost.requests for cost in costs),
                sum(cost.compute_tokens for cost in costs),
                sum(cost.kv_tokens for cost in costs),
                sum(cost.body_bytes for cost in costs),
            )

    @invariant()
    def known_instances_have_slots_of_their_own(self):
        holding = {lease.instance for lease, _ in self.leases}
        known = {i for i in self.seen if self.fleet.state(i) is not State.GONE}
        in_use = holding | known
        assert len({instance.slot for instance in in_use}) == len(in_use)

    @invariant()
    def draining_instances_hold_leases(self):
        holding = {lease.instance for lease, _ in self.leases}
        draining = {i for i in self.seen if self.fleet.state(i) is State.DRAINING}
        assert draining <= holding

    def teardown(self):  # type: ignore[explicit-override]  # new in 3.12
        for lease, _ in self.leases:
            lease.close()
        for instance in self.seen:
            assert self.fleet.load(instance) == NO_LOAD
            assert self.fleet.state(instance) is not State.DRAINING


TestFleetModel = FleetModel.TestCase
TestFleetModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
