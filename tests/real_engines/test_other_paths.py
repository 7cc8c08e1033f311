"""What is not split into legs: passed to an engine, and answered as the plain engine answers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.real_engines.engines import ask
from tests.real_engines.exchange import MESSAGES, RESPONSES, Lab


async def test_models_are_listed_once(lab: Lab) -> None:
    reply = await lab.get("/v1/models")

    assert [model["id"] for model in reply.json["data"]] == [lab.engines.model]
    assert reply.json["data"][0]["max_model_len"] == lab.engines.context_tokens


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
async def test_operators_paths_answer(lab: Lab, path: str) -> None:
    assert (await lab.get(path)).status == 200


async def test_text_is_tokenized_and_back(lab: Lab) -> None:
    model = lab.engines.model
    there = await lab.post("/tokenize", {"model": model, "prompt": "river stone"})
    back = await lab.post("/detokenize", {"model": model, "tokens": there.json["tokens"]})

    assert there.json["count"] == len(there.json["tokens"])
    assert "river stone" in back.json["prompt"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param(RESPONSES, {"input": "Go on.", "max_output_tokens": 12}, id="responses"),
        pytest.param(
            MESSAGES,
            {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 12},
            id="messages",
        ),
    ],
)
async def test_answer_of_this_api_is_the_plain_engines(
    lab: Lab, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": lab.engines.model, "temperature": 0, **fields}

    whole = await lab.post(path, body)
    streamed = await lab.post(path, {**body, "stream": True})

    expected = _texts((await lab.plain(path, body)).json)
    assert expected
    assert _texts(whole.json) == expected
    assert streamed.ended
    assert _streamed_text(streamed.body) == "".join(expected)


async def test_path_that_no_engine_knows_is_a_404(lab: Lab) -> None:
    body = {"model": lab.engines.model, "input": "x"}

    reply = await lab.post("/v1/no-such-path", body)

    assert reply.status == (await ask(lab.engines.plain, "POST", "/v1/no-such-path", body)).status


def _texts(document: object) -> list[str]:
    """Return every text of an answer, wherever it stands."""
    if isinstance(document, list):
        return [text for item in document for text in _texts(item)]
    if not isinstance(document, dict):
        return []
    if document.get("type") in ("output_text", "text"):
        return [str(document["text"])]
    inner = document.get("output") or document.get("content") or []
    return _texts(inner)


def _streamed_text(body: bytes) -> str:
    pieces: list[str] = []
    for line in body.decode().splitlines():
        if line.startswith("data:") and "delta" in line:
            event = _json(line.removeprefix("data:"))
            delta = event.get("delta")
            if event.get("type") == "response.output_text.delta":
                pieces.append(str(delta))
            elif isinstance(delta, dict) and delta.get("type") == "text_delta":
                pieces.append(delta["text"])
    return "".join(pieces)


def _json(text: str) -> dict[str, Any]:
    return dict(orjson.loads(text))
