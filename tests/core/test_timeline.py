import pytest

from pdproxy.core.timeline import Stage, Timeline


def whole(line: Timeline) -> Timeline:
    """Let a streamed request of one round pass."""
    line.mark_received(100.0)
    line.mark_prefill_started(101.0)
    line.mark_prefill_done(104.0)
    line.mark_decode_started(104.5, is_stream=True)
    line.mark_content(106.0)
    line.mark_content(109.0)
    line.mark_finished(110.0)
    return line


def test_each_stage_lasts_until_the_next_one():
    line = whole(Timeline(received=99.0))

    assert line.stages_s == {
        Stage.QUEUE: 1.0,
        Stage.PREFILL: 3.0,
        Stage.HANDOFF: 0.5,
        Stage.FIRST_TOKEN: 1.5,
        Stage.DECODE: 4.0,
    }
    assert (line.queue_s, line.ttft_s, line.total_s) == (1.0, 6.0, 10.0)
    assert line.tpot_s(output_tokens=4) == 1.0
    assert line.age_s(105.0) == 5.0


def test_stages_of_all_attempts_and_rounds_add_up_to_the_total():
    line = Timeline(received=0.0)
    line.mark_received(1.0)
    now = 1.0
    for _ in range(3):
        for step in (
            line.mark_prefill_started,
            line.mark_prefill_started,  # the first attempt failed
            line.mark_prefill_done,
            lambda at: line.mark_decode_started(at, is_stream=True),
            line.mark_content,
        ):
            now += 1.5
            step(now)
    line.mark_finished(now + 0.25)

    assert sum(line.stages_s.values()) == line.total_s == now + 0.25 - 1.0
    assert line.stages_s[Stage.PREFILL] == 9.0


def test_answer_that_is_not_streamed_is_decoded_from_the_start():
    line = Timeline(received=0.0)
    line.mark_received(0.0)
    line.mark_decode_started(1.0, is_stream=False)
    line.mark_finished(5.0)

    assert line.stages_s == {Stage.QUEUE: 1.0, Stage.DECODE: 4.0}
    assert line.ttft_s is None


def test_request_that_fails_before_its_body_is_read_has_that_stage_alone():
    line = Timeline(received=2.0)
    line.mark_finished(3.0)

    assert line.stages_s == {Stage.BODY: 1.0}
    assert line.total_s == 1.0


def test_own_time_is_what_lies_before_and_between_the_legs_without_the_waiting():
    line = Timeline(received=0.0)
    line.waited_s = 0.75
    whole(line)

    assert line.own_s == 0.75


def test_stages_that_overlap_are_not_told():
    line = Timeline(received=0.0, is_joint=True)
    whole(line)

    assert line.stages_s == {}
    assert line.own_s is None
    assert line.total_s == 10.0


def test_what_did_not_happen_has_no_duration():
    line = Timeline(received=0.0)

    assert (line.queue_s, line.own_s, line.ttft_s, line.total_s) == (None,) * 4
    assert line.tpot_s(10) is None


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_one_token_has_no_time_per_token(output_tokens):
    line = Timeline(received=0.0)
    line.mark_content(1.0)

    assert line.tpot_s(output_tokens) is None
