"""A replica repeats the owner's states, and leaves nothing of them to itself."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.health import HealthRules
from pdproxy.core.instance import Endpoint, Role, Source, State
from pdproxy.core.load import Cost
from pdproxy.core.policy import POLICIES
from pdproxy.core.record import EngineReport
from pdproxy.core.snapshot import Replica, Snapshot, take
from pdproxy.errors import NoInstance
from pdproxy.runtime.board import BoardMemory, SharedLoadBoard

D = Role.DECODE
RULES = HealthRules(slow_start_s=10.0)


class Pair:
    """The owner's fleet and one that follows it, as two processes have them."""

    def __init__(self, rng):
        self.memory = BoardMemory(2)
        self.now_s = 5.0
        self.owner, _ = self._fleet(None, rng)
        self.follower, board = self._fleet(0, rng)
        self.replica = Replica(self.follower.members, board.open_at)
        self.version = 0

    def _fleet(self, row, rng):
        board = SharedLoadBoard(self.memory, row)
        policies = {role: POLICIES["least_load"](role, rng) for role in Role}
        return Fleet(board, policies, lambda: self.now_s, RULES), board

    def publish(self):
        self.version += 1
        sent = msgspec.msgpack.encode(Snapshot(self.version, take(self.owner.members)))
        return self.replica.apply(msgspec.msgpack.decode(sent, type=Snapshot))

    def add(self, host, state=State.ACTIVE, source=Source.CONFIGURED):
        return self.owner.add(D, Endpoint(host, 1), state=state, source=source)[0]


@pytest.fixture
def pair():
    made = Pair(random.Random(1))
    yield made
    made.memory.close()


def test_replica_has_the_same_instances_in_the_same_states(pair):
    pair.add("::1")
    pair.add("b", State.JOINING, Source.CALL)
    pair.owner.set_capacity(pair.add("c"), 1000)
    pair.now_s = 9.0
    pair.publish()

    assert take(pair.follower.members) == take(pair.owner.members)
    assert pair.follower.state_age_s(pair.follower.instances(D)[0]) == 4.0
    assert pair.follower.is_pending(pair.follower.instances(D)[1])


def test_states_are_followed(pair):
    one, other = pair.add("a"), pair.add("b")
    pair.publish()
    pair.owner.report_failure(one, certain=True)
    pair.publish()

    assert [i.label for i in pair.follower.available(D)] == [other.label]
    assert pair.replica.is_blemished(pair.follower.instances(D)[0])
    pair.owner.admit(one)
    pair.now_s += 2
    pair.owner.admit(one)
    pair.owner.report_success(one)
    pair.publish()
    assert len(pair.follower.available(D)) == 2
    assert not pair.replica.is_blemished(pair.follower.instances(D)[0])


def test_what_engines_say_is_followed(pair):
    one = pair.add("a")
    report = EngineReport(capacity_tokens=1000, kv_usage=0.5, running=3, waiting=1)
    pair.owner.judge.engine_reported(one, report)
    pair.publish()
    (followed,) = pair.follower.instances(D)
    assert pair.follower.engine_report(followed) == report
    pair.owner.judge.engine_silent(one)
    pair.publish()

    assert pair.follower.engine_report(followed) == EngineReport(capacity_tokens=1000)


def test_older_snapshot_changes_nothing(pair):
    pair.add("a")
    old = Snapshot(0, ())
    pair.publish()

    assert pair.replica.apply(old) == []
    assert len(pair.follower.instances(D)) == 1


def test_draining_instance_is_gone_when_no_process_holds_a_lease(pair):
    instance = pair.add("a")
    pair.publish()
    lease = pair.follower.lease(D, Cost())
    pair.owner.set_state(instance, State.DRAINING)
    assert pair.owner.state(instance) is State.DRAINING
    pair.publish()
    with pytest.raises(NoInstance):
        pair.follower.lease(D, Cost())

    lease.close()
    assert pair.follower.state(lease.instance) is State.DRAINING
    pair.owner.members.settle()
    assert pair.owner.state(instance) is State.GONE
    assert pair.publish() == [lease.instance]
    assert list(pair.follower.members.all()) == []


def test_lease_outlives_the_instance_and_its_slot_is_not_taken(pair):
    instance = pair.add("a")
    pair.publish()
    lease = pair.follower.lease(D, Cost(kv_tokens=7))
    pair.owner.set_state(instance, State.GONE)
    pair.publish()

    assert pair.follower.instances(D) == ()
    assert pair.add("b").slot != instance.slot
    lease.recharge(Cost(kv_tokens=9))
    lease.close()
    pair.owner.members.settle()

    assert instance not in {member.instance for member in pair.owner.members.all()}
    assert pair.memory.sum(instance.slot).requests == 0


def test_engine_that_comes_back_is_another_instance(pair):
    first = pair.add("a")
    pair.publish()
    old = pair.follower.instances(D)[0]
    pair.owner.set_state(first, State.GONE)
    pair.add("a")

    assert pair.publish() == [old]
    assert [i.serial for i in pair.follower.instances(D)] == [first.serial + 1]


def test_slow_start_and_death_are_followed(pair):
    one, dead, failing = pair.add("a", State.JOINING), pair.add("b"), pair.add("c")
    pair.owner.admit(one)
    pair.owner.report_failure(dead, certain=True)
    for _ in range(3):
        pair.owner.report_failure(failing, certain=False)
    pair.publish()

    assert [i.label for i in pair.follower.available(D)] == [one.label, failing.label]
    assert pair.follower.ready_count(D) == 2
    member = pair.follower.members.get(pair.follower.instances(D)[0])
    assert member is not None
    assert member.ramp is not None
    ramp = member.ramp
    pair.publish()
    assert member.ramp is ramp
    assert ramp.share(pair.now_s + 5) == 0.5
