"""What has gone is told of for a while."""

from pdproxy.core.departed import KEPT, KEPT_S, Departed
from pdproxy.core.instance import Endpoint, Role, Source, State
from pdproxy.core.record import InstanceRecord


def record(port):
    return InstanceRecord(
        role=Role.DECODE,
        instance=f"h:{port}",
        source=Source.CALL,
        state=State.GONE,
        state_age_s=0.0,
        requests=0,
        compute_tokens=0,
        kv_tokens=0,
        capacity_tokens=None,
        ramp=1.0,
        ejections=0,
        is_dead=False,
        last_error="",
        last_error_age_s=None,
        engine=None,
    )


def test_the_latest_are_kept_for_a_while():
    now_s = 100.0
    departed = Departed(lambda: now_s)
    for port in range(1, KEPT + 3):
        departed.note(record(port))
    now_s += 5

    kept = departed.records()
    assert [each.instance for each in kept] == [f"h:{port}" for port in range(3, KEPT + 3)]
    assert {each.state_age_s for each in kept} == {5.0}
    now_s += KEPT_S
    assert departed.records() == []


def test_one_that_comes_back_is_not_among_them():
    departed = Departed(lambda: 0.0)
    departed.note(record(1))
    assert departed.find(Role.DECODE, Endpoint("H", 1)) is not None
    assert departed.find(Role.PREFILL, Endpoint("h", 1)) is None

    departed.forget(Role.DECODE, Endpoint("h", 1))

    assert departed.records() == []
