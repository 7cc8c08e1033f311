"""Failures eject, successes forgive, and what came back is on trial."""

import pytest

from pdproxy.core.health import Health, HealthRules

RULES = HealthRules(failures_to_eject=3, ejection_s=1.0, max_ejection_s=4.0)


def test_uncertain_failures_eject_when_enough_come_in_a_row():
    health = Health(RULES)

    assert [health.fail(0.0, certain=False) for _ in range(3)] == [False, False, True]


def test_success_between_failures_starts_the_count_again():
    health = Health(RULES)
    health.fail(0.0, certain=False)
    health.fail(0.0, certain=False)

    health.succeed()

    assert [health.fail(0.0, certain=False) for _ in range(3)] == [False, False, True]


@pytest.mark.case("C58")
def test_certain_failure_ejects_at_once():
    assert Health(RULES).fail(0.0, certain=True)


def test_instance_without_failures_can_return_at_any_time():
    assert Health(RULES).can_return(-1e9)


def test_ejection_lasts_its_time():
    health = Health(RULES)
    health.fail(100.0, certain=True)

    assert not health.can_return(100.9)
    assert health.can_return(101.0)


def test_returned_instance_is_ejected_by_one_failure_until_it_succeeds():
    health = Health(RULES)
    health.fail(0.0, certain=True)

    assert health.fail(1.0, certain=False)
    health.succeed()
    assert not health.fail(2.0, certain=False)


def test_ejections_in_a_row_double_up_to_the_maximum():
    health = Health(RULES)
    lengths = []
    for _ in range(2000):  # far more than doublings of a float
        health.fail(0.0, certain=True)
        lengths.append(next(s for s in (1.0, 2.0, 4.0) if health.can_return(s)))

    assert lengths[:4] == [1.0, 2.0, 4.0, 4.0]
    assert lengths[-1] == 4.0


def test_success_resets_the_length_of_ejections():
    health = Health(RULES)
    health.fail(0.0, certain=True)
    health.fail(0.0, certain=True)

    health.succeed()
    health.fail(10.0, certain=True)

    assert health.can_return(11.0)


# --- probes


def test_failed_probes_show_a_dead_engine_when_enough_come_in_a_row():
    health = Health(RULES)

    found = [health.probe_failed(0.0, certain=False, why="silent") for _ in range(2)]
    health.probe_succeeded()
    found += [health.probe_failed(0.0, certain=False, why="silent") for _ in range(3)]

    assert found == [False] * 4 + [True]


def test_refused_probe_shows_a_dead_engine_at_once():
    health = Health(RULES)

    assert health.probe_failed(5.0, certain=True, why="Connection refused")
    health.eject_dead(5.0)

    assert (health.ejections, health.last_error) == (1, "Connection refused")
    assert not health.can_return(5.9)
    assert health.can_return(6.0)


def test_good_probes_do_not_forgive_failed_requests():
    health = Health(RULES)

    results = []
    for _ in range(3):
        results.append(health.fail(0.0, certain=False))
        health.probe_succeeded()

    assert results == [False, False, True]


def test_successful_requests_do_not_forgive_failed_probes():
    health = Health(RULES)

    for _ in range(2):
        health.probe_failed(0.0, certain=False, why="silent")
        health.succeed()

    assert health.probe_failed(0.0, certain=False, why="silent")


def test_long_error_is_kept_in_part():
    health = Health(RULES)
    health.fail(0.0, certain=False, why="x" * 10_000)

    assert len(health.last_error) == 300
