import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.core.api import Api
from tests.core.toy_rounds import CONFIG, THINKER, Engine, Proxy, seen_by_client, whole_by_client

APIS = st.sampled_from(list(Api))
CUTS = st.lists(st.integers(0, 14), max_size=5)
STEPS = st.sampled_from([[1], [2, 1], [3], [1, 1, 4]])


@st.composite
def bodies(draw, /, api, **fields):
    """A request in one API, with what a client may want to be told beside the text."""
    body = {"model": "sim", "max_tokens": draw(st.integers(1, 40)), **fields}
    number = draw(st.integers(0, 1 << 16))
    if api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": f"word {number}"}]
    else:
        body["prompt"] = draw(st.sampled_from([f"word {number}", [300, 301, 302 + number % 50]]))
    body["temperature"] = draw(st.sampled_from([0, 0.7]))
    if draw(st.booleans()):
        body["return_token_ids"] = True
    if draw(st.booleans()):
        body["logprobs"] = True if api is Api.CHAT else 2
    return body


@pytest.mark.case("C24", "C25", "C26", "C27", "C28", "C33", "C39")
@settings(max_examples=80)
@given(st.data(), APIS, st.sampled_from([CONFIG, THINKER]), CUTS, STEPS, st.booleans())
def test_a_stream_cut_anywhere_is_the_uncut_stream(data, api, config, cuts, steps, is_lost):
    usage = data.draw(st.sampled_from([{}, {"include_usage": True}]))
    body = data.draw(bodies(api, stream=True, stream_options=usage))
    uncut = Engine(config, steps=steps).stream(api, body)

    proxy = Proxy(Engine(config, cuts=cuts, steps=steps, is_lost=is_lost))
    got, wanted = seen_by_client(proxy.stream(api, body)), seen_by_client(b"".join(uncut))

    assert got["choices"] == wanted["choices"]
    assert got["usage"] == wanted["usage"]
    assert got["roles"] == wanted["roles"]
    assert len(got["heads"]) == 1


@pytest.mark.case("C37")
@settings(max_examples=80)
@given(st.data(), APIS, st.sampled_from([CONFIG, THINKER]), CUTS, STEPS)
def test_a_whole_reply_cut_anywhere_is_the_uncut_reply(data, api, config, cuts, steps):
    body = data.draw(bodies(api))
    uncut = whole_by_client(Engine(config).whole(api, body))

    got = whole_by_client(Proxy(Engine(config, cuts=cuts, steps=steps)).whole(api, body))

    assert got["choices"] == uncut["choices"]
    assert {**got["usage"], **uncut["usage"]} == got["usage"]
