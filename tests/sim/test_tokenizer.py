from hypothesis import given
from hypothesis import strategies as st

from pdproxy.sim import tokenizer
from pdproxy.sim.model import Generation, Sampling, prefix_state

HALF = next(iter(tokenizer.TAIL_OF))


@given(st.text())
def test_text_comes_back_unchanged(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40), st.integers(1, 60))
def test_what_the_model_writes_tokenizes_to_the_ids_it_wrote(prompt, count):
    ids = tokenizer.encode(prompt) or [tokenizer.BOS]
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    generation = Generation(ids, prefix_state(ids), sampling)

    generation.advance(count)

    written = generation.output
    if written[-1] in tokenizer.TAIL_OF:
        written = written[:-1]
    assert tokenizer.encode(tokenizer.decode(ids + written)) == ids + written


def test_all_tokens_are_different():
    assert len(set(tokenizer.TOKEN_BYTES)) == len(tokenizer.TOKEN_BYTES) == tokenizer.VOCAB_SIZE


def test_specials_in_text_are_single_tokens():
    ids = tokenizer.encode("<|user|>\nhi<|end|>")

    assert ids[0] == tokenizer.USER
    assert ids[-1] == tokenizer.TURN_END


def test_specials_do_not_show_when_skipped_but_markers_do():
    ids = [tokenizer.EOS, tokenizer.THINK_END, tokenizer.CALL_BEGIN]

    assert tokenizer.decode(ids, skip_special=True) == "</think><tool_call>"


def test_half_a_character_is_seen():
    assert tokenizer.ends_inside_character([300, HALF])
    assert not tokenizer.ends_inside_character([300, HALF, tokenizer.TAIL_OF[HALF]])
    assert not tokenizer.ends_inside_character([])
