import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.sim import tokenizer
from pdproxy.sim.model import Generation, Sampling, Step, alternatives, prefix_state

PROMPT = tokenizer.encode("<|user|>\nTell me something.<|end|>\n<|assistant|>\n")
HALF = next(iter(tokenizer.TAIL_OF))


def write(prompt, count, *, state=None, index=0, **sampling):
    rules = {"max_tokens": count, "ignore_eos": True} | sampling
    generation = Generation(
        prompt, prefix_state(prompt) if state is None else state, Sampling(**rules), index=index
    )
    steps: list[Step] = []
    while not steps or steps[-1].finish_reason is None:
        steps.append(generation.advance())
    return generation, steps


def text_of(steps):
    return "".join(step.text for step in steps)


@given(st.lists(st.integers(0, tokenizer.VOCAB_SIZE - 1), max_size=60), st.data())
def test_states_compose_wherever_a_prefix_is_cut(ids, data):
    cut = data.draw(st.integers(0, len(ids)))

    assert prefix_state(ids[cut:], prefix_state(ids[:cut])) == prefix_state(ids)


@given(st.integers(1, 39))
def test_a_continuation_by_ids_goes_on_as_the_uncut_answer(cut):
    whole, _ = write(PROMPT, 40)

    rest, _ = write(PROMPT + whole.output[:cut], 40 - cut)

    assert whole.output[:cut] + rest.output == whole.output


def test_one_changed_token_of_the_prompt_changes_the_answer():
    other = [*PROMPT[:3], PROMPT[3] + 1, *PROMPT[4:]]

    assert write(PROMPT, 10)[0].output != write(other, 10)[0].output


def test_a_wrong_kv_state_changes_the_answer():
    assert write(PROMPT, 10)[0].output != write(PROMPT, 10, state=123)[0].output


def test_each_choice_differs_and_goes_on_alone_as_it_began():
    first, second = write(PROMPT, 10)[0].output, write(PROMPT, 10, index=1)[0].output

    rest = write(PROMPT + second[:4], 6)[0].output

    assert first != second
    assert second[:4] + rest == second


def test_seed_decides():
    assert write(PROMPT, 10, seed=1)[0].output == write(PROMPT, 10, seed=1)[0].output
    assert write(PROMPT, 10, seed=1)[0].output != write(PROMPT, 10, seed=2)[0].output


def test_text_deltas_are_whole_characters():
    generation, steps = write(PROMPT, 400)

    assert any(token in tokenizer.TAIL_OF for token in generation.output)
    assert "\ufffd" not in text_of(steps)


def test_ids_that_end_inside_a_character_bring_the_whole_prompt_as_text():
    _, steps = write([*PROMPT, HALF], 5)

    assert text_of(steps).startswith(tokenizer.decode(PROMPT))


def test_stop_string_ends_the_answer_and_is_left_out():
    _, steps = write(PROMPT, 40)
    full = text_of(steps)
    stop = full[20:27]

    generation, stopped = write(PROMPT, 40, stop=(stop, "\x00never"))

    assert text_of(stopped) == full[: full.index(stop)]
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", stop)
    assert len(generation.output) < 40


def test_stop_string_can_be_included():
    full = text_of(write(PROMPT, 40)[1])
    stop = full[20:27]

    _, stopped = write(PROMPT, 40, stop=(stop,), include_stop=True)

    assert text_of(stopped) == full[: full.index(stop) + len(stop)]


def test_cut_hands_out_the_text_held_back_for_a_stop_string():
    generation = Generation(
        PROMPT, prefix_state(PROMPT), Sampling(max_tokens=40, ignore_eos=True, stop=("x" * 30,))
    )
    steps = [generation.advance() for _ in range(10)]

    steps.append(generation.cut())

    assert text_of(steps) == text_of(write(PROMPT, 40)[1][:10])
    assert (steps[-1].tokens, steps[-1].stop_reason) == ((), "recomputed")


def test_stop_token_ends_the_answer():
    full, _ = write(PROMPT, 20)
    stop = full.output[7]

    generation, steps = write(PROMPT, 20, stop_token_ids=frozenset({stop}))

    assert generation.output[-1] == stop
    assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("stop", stop)
    assert tokenizer.token_text(stop) not in steps[-1].text


def test_min_tokens_puts_off_every_stop():
    full, _ = write(PROMPT, 20)

    generation, _ = write(
        PROMPT, 20, stop_token_ids=frozenset({full.output[2]}), min_tokens=10, eos_odds=1,
        ignore_eos=False,
    )  # fmt: skip

    assert len(generation.output) == 11


def test_answers_end_by_themselves():
    generation, steps = write(PROMPT, 5000, ignore_eos=False, eos_odds=16)

    assert generation.output[-1] == tokenizer.EOS
    assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("stop", None)


def test_several_tokens_can_come_in_one_step():
    one, _ = write(PROMPT, 20)
    generation = Generation(PROMPT, prefix_state(PROMPT), Sampling(max_tokens=20, ignore_eos=True))

    steps = [generation.advance(8) for _ in range(3)]

    assert [len(step.tokens) for step in steps] == [8, 8, 4]
    assert generation.output == one.output


@pytest.mark.parametrize("cut", range(1, 20))
def test_reasoning_has_its_length_wherever_it_is_cut(cut):
    prompt = [*PROMPT, tokenizer.THINK_BEGIN]
    whole, _ = write(prompt, 30, thinking_tokens=12)

    rest, _ = write(prompt + whole.output[:cut], 30 - cut, thinking_tokens=12)

    assert whole.output.index(tokenizer.THINK_END) in (12, 13)
    assert whole.output[:cut] + rest.output == whole.output


def test_alternatives_begin_with_the_chosen_token_and_fall():
    ranked = alternatives(5, 300, 4)

    assert ranked[0][0] == 300
    assert [value for _, value in ranked] == sorted((v for _, v in ranked), reverse=True)
