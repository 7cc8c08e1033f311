import pytest

from pdproxy.sim.problems import Problem
from pdproxy.sim.template import IMAGE_TOKENS, Turn, render

USER = {"role": "user", "content": "hi"}


def test_a_plain_conversation():
    assistant = {"role": "assistant", "content": "yes"}

    text = render(Turn(messages=[USER, assistant, USER]))

    assert text == (
        "<s><|user|>\nhi<|end|>\n<|assistant|>\nyes<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n"
    )


def test_an_open_turn_extends_the_prompt_it_answers():
    opened = {"role": "assistant", "content": "yes, and "}
    goes_on = Turn(
        messages=[USER, opened], continue_final_message=True, add_generation_prompt=False
    )

    assert render(goes_on) == render(Turn(messages=[USER])) + "yes, and "


def test_an_open_turn_with_reasoning_extends_the_prompt_that_opened_thinking():
    opened = {"role": "assistant", "reasoning": "hm", "content": "yes"}
    goes_on = Turn(messages=[USER, opened], continue_final_message=True, reasoning=True)

    assert render(goes_on) == render(Turn(messages=[USER], reasoning=True)) + "hm</think>yes"


def test_an_open_turn_without_text_is_refused():
    opened = {"role": "assistant", "content": None}

    with pytest.raises(Problem):
        render(Turn(messages=[USER, opened], continue_final_message=True))


def test_an_image_is_placeholders_and_a_fingerprint():
    def text(url):
        part = {"type": "image_url", "image_url": {"url": url}}
        return render(Turn(messages=[{"role": "user", "content": [part]}]))

    assert text("http://a/1.png").count("<|image|>") == IMAGE_TOKENS
    assert text("http://a/1.png") != text("http://a/2.png")


def test_a_tool_call_of_an_earlier_turn_counts_without_its_id():
    def text(call_id, name):
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        return render(Turn(messages=[USER, turn]))

    assert text("1", "f") == text("2", "f") != text("1", "g")
