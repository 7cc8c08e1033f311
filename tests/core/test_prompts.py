import json

import pytest

from pdproxy.core.answer import Held
from pdproxy.core.api import Api, parse_generate
from pdproxy.core.jsonfields import Raw
from pdproxy.core.prompts import joined_ids, prompt_ids, prompt_text, with_open_turn
from tests.core.making import MESSAGES, answer_of, chat, completions


@pytest.mark.case("C33")
@pytest.mark.parametrize(
    ("prompt", "kept", "wanted", "count"),
    [
        pytest.param(b"[1, 2]", [3, 4], b"[1, 2,3,4]", 4, id="several"),
        pytest.param(b"[7]", [8], b"[7,8]", 2, id="one id"),
        pytest.param(b"[7]", [], b"[7]", 1, id="no output"),
        pytest.param(b" [ ] ", [8], b"[8]", 1, id="no prompt"),
    ],
)
def test_ids_are_joined_as_they_came(prompt, kept, wanted, count):
    assert joined_ids(Raw(prompt), kept) == (Raw(wanted), count)


def test_a_hundred_thousand_ids_are_joined():
    ids = list(range(100_000))

    joined, count = joined_ids(Raw(json.dumps(ids).encode()), [5])

    assert json.loads(bytes(joined)) == [*ids, 5]
    assert count == 100_001


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        pytest.param([5, 6], [5, 6], id="ids"),
        pytest.param([[5, 6]], [5, 6], id="a list of one prompt of ids"),
        pytest.param("once", None, id="text"),
        pytest.param(["once"], None, id="a list of one text"),
    ],
)
def test_ids_that_the_client_sent_serve_as_the_prompts(prompt, wanted):
    found = prompt_ids(completions(prompt=prompt), answer_of(prompt_ids=None))

    assert (None if found is None else json.loads(bytes(found))) == wanted


def test_ids_that_the_engine_gave_come_first():
    assert prompt_ids(completions(prompt=[5]), answer_of(prompt_ids=[1, 5])) == Raw(b"[1,5]")


def test_the_ids_of_embeddings_say_nothing():
    assert prompt_ids(completions(prompt_embeds="AAAA"), answer_of()) is None


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        pytest.param(completions(), "once", id="text"),
        pytest.param(completions(prompt=["once"]), "once", id="a list of one text"),
        pytest.param(completions(prompt=[5]), None, id="ids"),
        pytest.param(completions(prompt=["once", "twice"]), None, id="several"),
        pytest.param(completions(prompt=None), None, id="null"),
        pytest.param(chat(), None, id="chat"),
    ],
)
def test_only_a_text_is_a_prompt_text(request_, wanted):
    assert prompt_text(request_) == wanted


def turned(request, **answer):
    raw = with_open_turn(request, answer_of(**answer).choice(0))
    return None if raw is None else json.loads(bytes(raw))


@pytest.mark.case("C25")
def test_the_answer_so_far_is_an_open_assistant_turn():
    turn = {"role": "assistant", "content": "Hel"}

    assert turned(chat(), content="Hel") == [*MESSAGES, turn]


def test_messages_stay_as_the_client_spelled_them():
    spelled = b'{"content" : "\\u0068i", "x":1.0,"role":"user"}'
    request = parse_generate(Api.CHAT, b'{"messages": [ ' + spelled + b" , {} ]}")

    found = with_open_turn(request, answer_of("a").choice(0))

    assert found == Raw(b"[" + spelled + b',{},{"role":"assistant","content":"a"}]')


@pytest.mark.case("C28")
def test_reasoning_stands_beside_content_without_the_line_ends_between():
    found = turned(chat(), content="\n\nHel", reasoning="\nI think\n")

    assert found[-1] == {"role": "assistant", "reasoning": "I think", "content": "Hel"}


def test_content_that_has_not_begun_is_empty_and_not_null():
    assert turned(chat(), reasoning="I think")[-1]["content"] == ""


def test_held_text_is_part_of_the_turn():
    assert turned(chat(), content="so ", held=Held("EN"))[-1]["content"] == "so EN"


OPEN = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        pytest.param("So far", "So far, good", id="text"),
        pytest.param(
            [{"type": "image_url"}, {"type": "text", "text": "So far"}],
            [{"type": "image_url"}, {"type": "text", "text": "So far, good"}],
            id="parts",
        ),
    ],
)
def test_a_turn_that_the_client_left_open_grows(content, wanted):
    messages = [*MESSAGES, {"role": "assistant", "content": content}]

    found = turned(chat(messages=messages, **OPEN), content=", good")

    assert found == [*MESSAGES, {"role": "assistant", "content": wanted}]


@pytest.mark.parametrize(
    ("messages", "reasoning"),
    [
        pytest.param([{"role": "assistant", "content": None}], "", id="no content"),
        pytest.param([{"role": "assistant", "content": [{"type": "image"}]}], "", id="an image"),
        pytest.param([{"role": "assistant", "content": "x"}], "hm", id="reasoning"),
        pytest.param([], "", id="no message"),
    ],
)
def test_an_open_turn_without_text_at_its_end_cannot_grow(messages, reasoning):
    assert turned(chat(messages=messages, **OPEN), content="a", reasoning=reasoning) is None
