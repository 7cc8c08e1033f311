"""An answer that is not streamed is one JSON document, however many rounds it took."""

from __future__ import annotations

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.cuts import HASTE, cut_after, decodes, limit_of, prefills, prefix_of, spoken
from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.cases.sims import sims, told
from tests.fakes import behaviours, toy

IDS = pytest.mark.parametrize("ids", ["auto", "always", "never"])
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.mark.case("C37", "C27")
@IDS
@PATHS
async def test_two_recomputes_give_one_document(ids, path):
    make = chat if path == CHAT else completion
    body = make(max_tokens=12)
    prompt, answer = toy.prompts(body)[0], spoken(body, 12)

    async with scene([None], [cut_after(4, 3)], "--token-ids", ids, *HASTE) as stage:
        reply = await stage.post(path, body)
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert reply.text == toy.answer(body, 12)
    (choice,) = reply.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 12}
    assert usage.items() <= reply.json["usage"].items()
    assert reply.json["usage"]["total_tokens"] == len(prompt) + 12
    assert not reply.json.get("kv_transfer_params")
    assert choice.get("token_ids") is None
    assert isinstance(reply.json["created"], int)
    assert reply.json["model"] == "toy"
    own = [call.headers["x-request-id"] for call in decodes(stage)]
    assert any(reply.json["id"].endswith(each) for each in own)
    assert [prefix_of(call) for call in decodes(stage)] == [
        prompt,
        prompt + answer[:4],
        prompt + answer[:7],
    ]
    assert [limit_of(call) for call in decodes(stage)] == [12, 8, 5]


@pytest.mark.case("C39")
@IDS
@PATHS
async def test_whole_answer_cut_at_its_limit_is_complete(ids, path):
    make = chat if path == CHAT else completion
    body = make(max_tokens=8)

    async with scene([None], [cut_after(8)], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)

    assert reply.text == toy.answer(body, 8)
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens"] == 8
    assert (len(prefills(stage)), len(decodes(stage))) == (1, 1)


@pytest.mark.case("C37")
@pytest.mark.parametrize(("status", "told"), [(400, 503), (500, 500)])
async def test_failure_in_a_later_round_has_a_status(status, told):
    d = cut_after(4, 3, then=behaviours.error(status, "no such thing"))

    async with scene([None], [d], "--max-retries", "1", *HASTE) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=12))
        await stage.assert_quiescent()

    assert reply.status == told
    assert reply.error["message"].endswith("no such thing")


@pytest.mark.case("C37", "C71")
async def test_decoder_lost_in_a_later_round_is_followed_by_another():
    body = chat(max_tokens=12)

    async with sims(SimConfig(eos_odds=1 << 30)) as stage:
        body = {"messages": body["messages"], "max_tokens": 12}
        stage.decoder.faults.recompute_after[:] = [4]
        stage.decoder.faults.drop_after[:] = [None, 3]
        given, uncut = await stage.both(CHAT, body)

    assert told(given).choices == told(uncut).choices
    assert told(given).usage == told(uncut).usage


@pytest.mark.case("C37")
async def test_error_event_in_a_later_round_is_an_error_status():
    async with sims(SimConfig(eos_odds=1 << 30), "--max-retries", "1") as stage:
        stage.decoder.faults.recompute_after[:] = [4]
        stage.decoder.faults.error_after[:] = [None, 3]
        given, _ = await stage.both(CHAT, {"messages": chat()["messages"], "max_tokens": 12})

    assert given.status == 500
    assert given.error["message"]
