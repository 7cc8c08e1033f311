"""Policies compare loads in documented units, and equal loads rotate."""

import random
from collections import Counter

import pytest

from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.load import NO_LOAD, Cost, Load
from pdproxy.core.policy import POLICIES, Candidate, decode_scores, prefill_scores

COST = Cost(compute_tokens=1000, kv_tokens=1200, body_bytes=4000)
LOAD_AWARE = ["least_load", "power_of_two", "reference"]


def candidates(*loads, role=Role.DECODE, capacity=None):
    return [
        Candidate(Instance(role, Endpoint("h", slot + 1), slot, slot), load, capacity)
        for slot, load in enumerate(loads)
    ]


def picks(policy, count, *loads, **shape):
    chosen: Counter[int] = Counter()
    for _ in range(count):
        chosen[policy.pick(candidates(*loads, **shape), COST).instance.slot] += 1
    return [chosen[slot] for slot in range(len(loads))]


def make(name, role=Role.DECODE, seed=1):
    return POLICIES[name](role, random.Random(seed))


def test_registry_names_every_policy_by_its_own_name():
    assert set(POLICIES) == {"least_load", "round_robin", "random", "power_of_two", "reference"}
    assert all(make(name).name == name for name in POLICIES)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("role", Role)
def test_only_candidate_is_picked(name, role):
    (only,) = candidates(Load(9, 9, 9, 9))

    assert make(name, role).pick([only], COST) is only


@pytest.mark.case("C49")
@pytest.mark.parametrize("name", [*LOAD_AWARE, "round_robin"])
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("seed", range(5))
def test_equal_instances_share_sequential_requests_equally(name, role, seed):
    shares = picks(make(name, role, seed), 100, NO_LOAD, NO_LOAD, NO_LOAD)

    assert sorted(shares) == [33, 33, 34]


@pytest.mark.case("C49")
@pytest.mark.parametrize("name", [*LOAD_AWARE, "round_robin"])
def test_rotation_does_not_start_at_the_same_instance_for_every_seed(name):
    first = {
        make(name, seed=seed).pick(candidates(*[NO_LOAD] * 4), COST).instance.slot
        for seed in range(40)
    }

    assert first == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["least_load", "reference"])
def test_equal_ones_share_equally_beside_a_busy_one(name):
    busy = Load(5, 9000, 9000, 90_000)

    assert picks(make(name), 100, busy, NO_LOAD, NO_LOAD) == [0, 50, 50]


@pytest.mark.parametrize("name", LOAD_AWARE)
@pytest.mark.parametrize("role", Role)
def test_only_busy_instance_gets_nothing_while_another_is_idle(name, role):
    busy = Load(1, 1000, 1200, 4000)

    assert picks(make(name, role), 90, NO_LOAD, busy, NO_LOAD)[1] == 0


def test_random_reaches_all():
    shares = picks(make("random"), 300, NO_LOAD, NO_LOAD, Load(9, 9000, 9000, 9000))

    assert min(shares) > 60


def test_power_of_two_never_takes_the_worst_and_draws_from_all_others():
    loads = [Load(n, 1000 * n, 1000 * n, 1000 * n) for n in range(1, 6)]

    shares = picks(make("power_of_two"), 500, *loads)

    assert shares[-1] == 0
    assert all(shares[:-1])
    assert shares[0] > shares[3]


@pytest.mark.case("C48")
def test_computing_prefiller_weighs_more_than_one_that_only_holds_kv():
    computing = Load(1, compute_tokens=5000, kv_tokens=5000)
    handed_over = Load(1, compute_tokens=0, kv_tokens=5000)

    shares = picks(make("least_load", Role.PREFILL), 10, computing, handed_over)

    assert shares == [0, 10]


@pytest.mark.case("C48")
def test_prefill_score_falls_with_the_answer_and_again_with_the_pull():
    loads = [Load(1, 5000, 5000), Load(1, 0, 5000), NO_LOAD]

    computing, holding, free = prefill_scores(candidates(*loads), COST)

    assert computing > holding > free


def test_held_kv_decides_between_equally_busy_prefillers():
    loads = [Load(2, 5000, 8000), Load(2, 5000, 5000)]

    assert picks(make("least_load", Role.PREFILL), 5, *loads) == [0, 5]


def test_own_tokens_in_the_prefix_cache_need_no_computing():
    cold, warm = candidates(NO_LOAD, Load(1, compute_tokens=300), role=Role.PREFILL)
    warm = Candidate(warm.instance, warm.load, cached_tokens=900)

    assert make("least_load", Role.PREFILL).pick([cold, warm], COST) is warm
    assert prefill_scores([warm], Cost(compute_tokens=100))[0] == 300 + 64


def test_prompts_without_estimate_still_count_as_requests():
    no_tokens = Load(requests=1)

    assert picks(make("least_load", Role.PREFILL), 10, no_tokens, NO_LOAD) == [0, 10]


def test_decoder_with_fewer_requests_wins_at_equal_tokens():
    loads = [Load(5, kv_tokens=6000), Load(4, kv_tokens=6000)]

    assert picks(make("least_load"), 5, *loads) == [0, 5]
    assert picks(make("least_load"), 5, *loads, capacity=100_000) == [0, 5]


def test_decoder_with_fewer_tokens_wins_at_equal_requests():
    loads = [Load(5, kv_tokens=90_000), Load(5, kv_tokens=10_000)]

    assert picks(make("least_load"), 5, *loads) == [0, 5]
    assert picks(make("least_load"), 5, *loads, capacity=400_000) == [0, 5]


def test_larger_decoder_takes_more():
    small, large = candidates(Load(10, kv_tokens=50_000), Load(12, kv_tokens=60_000))
    small = Candidate(small.instance, small.load, 100_000)
    large = Candidate(large.instance, large.load, 400_000)

    assert make("least_load").pick([small, large], COST) is large


def test_nearly_full_decoder_is_left_out_however_few_its_requests():
    full, busy = candidates(Load(1, kv_tokens=96_000), Load(80, kv_tokens=90_000), capacity=100_000)

    assert make("least_load").pick([full, busy], COST) is busy


def test_least_full_is_taken_when_all_are_full():
    loads = [Load(3, kv_tokens=300_000), Load(3, kv_tokens=97_000), Load(3, kv_tokens=110_000)]

    assert picks(make("least_load"), 5, *loads, capacity=100_000) == [0, 5, 0]


def test_unknown_capacity_counts_as_the_mean_of_the_known():
    one, other, unknown = candidates(*[Load(3, kv_tokens=30_000)] * 3)
    one = Candidate(one.instance, one.load, 50_000)
    other = Candidate(other.instance, other.load, 150_000)
    mean = Candidate(unknown.instance, unknown.load, 100_000)

    scores = decode_scores([one, other, unknown], COST)

    assert scores == decode_scores([one, other, mean], COST)


@pytest.mark.parametrize(
    ("role", "loads", "winner"),
    [
        # 10 kB and one request: 86 + 120 ms; 4 kB and two: 35 + 240 ms.
        pytest.param(Role.PREFILL, [Load(1, 0, 0, 10_000), Load(2, 0, 0, 4000)], 0, id="prefill"),
        pytest.param(Role.DECODE, [Load(1, 0, 0, 10_000), Load(2, 0, 0, 4000)], 1, id="decode"),
    ],
)
def test_reference_counts_bytes_and_on_prefillers_requests(role, loads, winner):
    shares = picks(make("reference", role), 5, *loads)

    assert shares[winner] == 5
