import random

import pytest

from pdproxy.core.admission import (
    MAX_HEAD_START,
    Blocker,
    Limits,
    Line,
    Need,
    Pending,
    blocker,
    full,
    rank,
)
from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.load import Load
from pdproxy.core.policy import Candidate


def some(role, *held):
    """Candidates from (requests, KV tokens held, capacity)."""
    return [
        Candidate(Instance(role, Endpoint("h", n + 1), n, n), Load(requests, 0, tokens), capacity)
        for n, (requests, tokens, capacity) in enumerate(held)
    ]


def prefillers(*requests):
    return some(Role.PREFILL, *((count, 0, None) for count in requests))


def decoders(*held):
    return some(Role.DECODE, *held)


IDLE = (0, 0, None)
OFF = Limits(waits_for_kv=False)
CAPS = Limits(max_per_prefiller=2, max_per_decoder=3)


@pytest.mark.parametrize(
    ("limits", "p", "d", "pending", "need", "expected"),
    [
        pytest.param(Limits(), [9], [(9, 9, None)], Pending(), Need(True, 9), None, id="no-limit"),
        pytest.param(CAPS, [2, 1], [IDLE], Pending(), Need(True, 9), None, id="one-free"),
        pytest.param(
            CAPS, [2, 2], [IDLE], Pending(), Need(True, 9), Blocker.PREFILLERS, id="p-full"
        ),
        pytest.param(CAPS, [2, 2], [IDLE], Pending(), Need(False, 9), None, id="needs-no-p"),
        pytest.param(
            CAPS, [1], [IDLE], Pending(prefills=1), Need(True, 9), Blocker.PREFILLERS, id="p-taken"
        ),
        pytest.param(
            CAPS, [0], [(3, 0, None)], Pending(), Need(True, 9), Blocker.DECODERS, id="d-full"
        ),
        pytest.param(
            CAPS, [0], [(1, 0, None)], Pending(decodes=2), Need(True, 9), Blocker.DECODERS, id="due"
        ),
        pytest.param(
            CAPS,
            [0],
            [(1, 0, None)],
            Pending(decodes=2),
            Need(False, 9, is_due=True),
            None,
            id="whose-turn-it-is-minds-nobody-behind",
        ),
        pytest.param(Limits(), [0], [(0, 91, 100)], Pending(), Need(True, 9), None, id="kv-fits"),
        pytest.param(
            Limits(), [0], [(0, 92, 100)], Pending(), Need(True, 9), Blocker.KV, id="kv-full"
        ),
        pytest.param(
            Limits(), [0], [(0, 0, 100)], Pending(0, 1, 92), Need(True, 9), Blocker.KV, id="kv-due"
        ),
        pytest.param(
            Limits(),
            [0],
            [(0, 95, 100), (0, 95, 100)],
            Pending(),
            Need(True, 9),
            Blocker.KV,
            id="room-in-no-single-one",
        ),
        pytest.param(
            Limits(),
            [0],
            [(0, 99, 100), (0, 99, None)],
            Pending(),
            Need(True, 9),
            None,
            id="unknown",
        ),
        pytest.param(
            Limits(), [0], [(0, 99, 100)], Pending(), Need(True, 101), None, id="fits-nowhere"
        ),
        pytest.param(
            Limits(waits_for_kv=False),
            [0],
            [(0, 99, 100)],
            Pending(),
            Need(True, 9),
            None,
            id="off",
        ),
        pytest.param(CAPS, [], [], Pending(), Need(True, 9), None, id="nobody-there"),
    ],
)
def test_what_stands_in_the_way(limits, p, d, pending, need, expected):
    assert blocker(limits, prefillers(*p), decoders(*d), pending, need) is expected


def test_full_instances_are_named():
    one, two, three = decoders((3, 0, None), (0, 95, 100), (2, 50, 100))

    names = [each.instance for each in (one, two, three)]
    assert full([one, two, three], 3, 10) == names[:2]
    assert full([one, two, three], 0, 10) == names[1:2]
    assert full([one, two, three], 0, 0) == []


def test_lower_priority_goes_first_and_age_outweighs_it():
    queue_s = 40.0

    assert rank(-1, 5.0, queue_s) < rank(0, 5.0, queue_s) < rank(1, 5.0, queue_s)
    assert rank(5, 0.0, queue_s) < rank(0, 5.5, queue_s)


@pytest.mark.parametrize("queue_s", [0.5, 30.0, None])
@pytest.mark.parametrize("worst", [7, 1000, 10**30])
def test_who_has_waited_half_of_the_longest_wait_is_not_overtaken(queue_s, worst):
    longest_s = 120.0 if queue_s is None else queue_s
    half_s = 2 * MAX_HEAD_START * longest_s

    assert rank(worst, 0.0, queue_s) <= rank(-worst, half_s, queue_s)


def test_line_is_in_order_of_rank_then_of_arrival():
    line: Line[str] = Line()
    for rank_, item in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        line.push(rank_, item)

    seen = []
    while (first := line.first()) is not None:
        seen.append(first)
        line.pop()
    line.pop()

    assert seen == ["a", "b", "c", "d"]
    assert len(line) == 0


def test_who_leaves_the_line_is_not_found_in_it():
    rng = random.Random(5)
    line: Line[int] = Line()
    numbers = {line.push(rng.random(), item): item for item in range(200)}
    left = rng.sample(sorted(numbers), 150)
    for number in left:
        line.remove(number)
    assert len(line) == 50

    seen = set()
    while (item := line.first()) is not None:
        seen.add(item)
        line.pop()

    assert seen == set(numbers.values()) - {numbers[number] for number in left}
