from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.pauses import Pauses

ONE = Instance(Role.PREFILL, Endpoint("h", 1), 0, 1)
TWO = Instance(Role.PREFILL, Endpoint("h", 2), 1, 2)


def test_instance_is_left_alone_until_its_time_is_over():
    pauses = Pauses()
    assert list(pauses.current(0.0)) == []

    pauses.note(ONE, 5.0)
    pauses.note(TWO, 2.0)

    assert set(pauses.current(1.9)) == {ONE, TWO}
    assert set(pauses.current(2.0)) == {ONE}
    assert list(pauses.current(5.0)) == []


def test_later_shorter_pause_does_not_end_the_longer_one():
    pauses = Pauses()
    pauses.note(ONE, 5.0)
    pauses.note(ONE, 2.0)

    assert set(pauses.current(4.0)) == {ONE}
