"""The official OpenAI SDK, blocking: each answer is what a plain engine answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from pydantic import BaseModel

from tests.clients import asked
from tests.clients.asked import ALL, Asked, chat, endless, lasting, says, text_of
from tests.clients.lab import HOST, MODEL, Lab, wait_until
from tests.fakes.ports import refusing_port


def sdk(url: str, **options: Any) -> OpenAI:
    """Return a client that neither tries again by itself nor heeds proxies of the environment."""
    # Without TLS there is nothing to verify, and certificates take long to load.
    http = DefaultHttpxClient(trust_env=False, verify=False)
    settings: dict[str, Any] = {"api_key": "sk-test", "max_retries": 0, "timeout": 60}
    settings |= {"http_client": http, **options}
    return OpenAI(base_url=f"{url}/v1", **settings)


@pytest.fixture(scope="module")
def shared_client(shared_lab: Lab) -> Iterator[OpenAI]:
    with sdk(shared_lab.url) as client:
        yield client


@pytest.fixture
def client(shared_client: OpenAI, lab: Lab) -> OpenAI:
    return shared_client


@pytest.fixture(scope="module")
def plain(shared_lab: Lab) -> Iterator[OpenAI]:
    with sdk(shared_lab.plain.url) as client:
        yield client


# --- answers


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_answer_is_the_plain_engines(client: OpenAI, plain: OpenAI, request_: Asked) -> None:
    answer = request_.create(client)

    assert lasting(answer) == lasting(request_.create(plain))
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_stream_is_the_plain_engines(client: OpenAI, plain: OpenAI, request_: Asked) -> None:
    chunks = list(request_.create(client, **asked.USAGE_IN_STREAM))

    expected = list(request_.create(plain, **asked.USAGE_IN_STREAM))
    assert by_choice(chunks) == by_choice(expected)
    assert len({chunk.id for chunk in chunks}) == 1
    assert not chunks[-1].choices
    assert lasting(chunks[-1].usage) == lasting(expected[-1].usage)


def by_choice(chunks: list[Any]) -> dict[int, list[Any]]:
    """Return the choices' parts by index, since the order between choices is nobody's promise."""
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).append(lasting(choice))
    return parts


def test_stream_without_options_has_no_usage(client: OpenAI) -> None:
    chunks = list(chat(**asked.EXACT).create(client, stream=True))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_stream_helper_puts_the_answer_together(client: OpenAI, plain: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=says("Bonjour"),  # type: ignore[arg-type] # plain data
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    expected = ALL["no-limit"].create(plain)
    assert final.choices[0].message.content == expected.choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_both_roles_have_worked(lab: Lab, client: OpenAI) -> None:
    before, computed = lab.prefills, computed_by_decoders(lab)

    chat("Qui a fait quoi ?").create(client)

    assert lab.prefills == before + 1
    assert computed_by_decoders(lab) == computed
    assert not any(engine.engine.counters.wrong_transfers for engine in lab.decoders)


def computed_by_decoders(lab: Lab) -> int:
    """Return how many prompt tokens the decoders did not pull."""
    return sum(engine.engine.counters.by_source["local_compute"] for engine in lab.decoders)


# --- tools, documents, figures


@pytest.mark.parametrize("name", ["tools-auto", "tools-required", "tools-named"])
def test_tool_call_can_be_called(client: OpenAI, name: str) -> None:
    choice = ALL[name].create(client).choices[0]

    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


@pytest.mark.parametrize("name", ["tools-auto", "tools-required", "tools-named"])
def test_streamed_tool_call_adds_up(client: OpenAI, name: str) -> None:
    chunks = list(ALL[name].create(client, stream=True))

    parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or []]
    whole = ALL[name].create(client).choices[0].message.tool_calls[0].function
    assert [part.function.name for part in parts if part.function.name] == ["weather"]
    assert "".join(part.function.arguments or "" for part in parts) == whole.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class City(BaseModel):
    name: str
    people: int


def test_document_under_a_schema_parses_into_its_class(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=says("A city?"),  # type: ignore[arg-type] # plain data
        response_format=City,
    )

    assert isinstance(parsed.choices[0].message.parsed, City)
    assert parsed.choices[0].finish_reason == "stop"


def test_streamed_document_parses(client: OpenAI) -> None:
    text = text_of(list(ALL["json-schema"].create(client, stream=True)))

    assert City.model_validate_json(text).name


def test_logprobs_are_there_for_each_token(client: OpenAI) -> None:
    answer = ALL["logprobs"].create(client)

    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_choices_differ_and_are_all_finished(client: OpenAI) -> None:
    chunks = list(ALL["choices"].create(client, **asked.USAGE_IN_STREAM))

    texts = [text_of(chunks, index) for index in range(2)]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert texts[0] != texts[1]
    assert sorted(ends) == [0, 1]
    assert chunks[-1].usage.completion_tokens == 48


# --- the rest of the API


def test_models_are_listed_as_the_engine_does(client: OpenAI, plain: OpenAI) -> None:
    models = client.models.list().data

    assert [model.id for model in models] == [MODEL]
    assert models[0].model_dump()["root"] == plain.models.list().data[0].model_dump()["root"]


@pytest.mark.parametrize("given", ["un", ["un", "deux"]], ids=["one", "list"])
def test_embeddings_pass_through(client: OpenAI, plain: OpenAI, given: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=given)

    assert lasting(answer) == lasting(plain.embeddings.create(model=MODEL, input=given))


def test_responses_pass_through(client: OpenAI, plain: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "Bonjour", "max_output_tokens": 9}

    answer = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))

    assert answer.output_text == plain.responses.create(**ask).output_text
    assert answer.output_text
    kinds = [event.type for event in plain.responses.create(**ask, stream=True)]
    assert [event.type for event in events] == kinds
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        answer.output_text
    )


def test_request_id_is_in_the_answer(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=says("Bonjour"),  # type: ignore[arg-type] # plain data
        max_completion_tokens=2,
        extra_headers={"X-Request-Id": "mine-1"},
    )
    answer = chat().create(client)
    other = chat().create(client)

    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content
    assert answer._request_id
    assert answer._request_id != other._request_id


def test_streaming_response_shows_its_headers(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=says("Bonjour"),  # type: ignore[arg-type] # plain data
        max_completion_tokens=2,
        stream=True,
    ) as raw:
        lines = list(raw.iter_lines())

    assert raw.headers["x-request-id"]
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert lines.count("data: [DONE]") == 1


# --- errors by class


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_bad_request_is_the_engines_own(client: OpenAI, plain: OpenAI, is_stream: bool) -> None:
    bad = chat(max_completion_tokens=-1, stream=is_stream)

    with pytest.raises(openai.BadRequestError) as found:
        bad.create(client)
    with pytest.raises(openai.BadRequestError) as expected:
        bad.create(plain)

    assert found.value.body == expected.value.body
    assert found.value.param == "max_tokens"
    assert found.value.request_id


def test_bad_request_that_the_proxy_finds_itself(lab: Lab, client: OpenAI) -> None:
    before = lab.prefills

    with pytest.raises(openai.BadRequestError) as found:
        chat(n="two").create(client)

    assert found.value.type in {"invalid_request_error", "BadRequestError", "Bad Request"}
    assert found.value.message
    assert lab.prefills <= before + 1


def test_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(
            model="other",
            messages=says("Bonjour"),  # type: ignore[arg-type] # plain data
        )

    assert "other" in found.value.message
    assert found.value.param == "model"


def test_unknown_path_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.get("/../nowhere", cast_to=object)


def test_wrong_key_is_no_authentication(lab: Lab) -> None:
    with lab.another_proxy("--api-key", "sk-right") as worker:
        url = f"http://{HOST}:{worker.port}"
        with sdk(url, api_key="sk-wrong") as wrong, sdk(url, api_key="sk-right") as right:
            with pytest.raises(openai.AuthenticationError) as found:
                chat().create(wrong)
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            answer = chat().create(right)
            models = right.models.list().data

    assert found.value.code == "invalid_api_key"
    assert answer.choices[0].message.content
    assert models


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_busy_engines_are_a_rate_limit_with_its_pause(
    lab: Lab, client: OpenAI, is_stream: bool
) -> None:
    for engine in lab.decoders:
        engine.faults.status = [429]
        engine.faults.retry_after_s = 7

    with pytest.raises(openai.RateLimitError) as found:
        chat(stream=is_stream).create(client)

    assert found.value.response.headers["retry-after"] == "7"
    assert found.value.type == "RateLimitError"


def test_busy_engine_is_not_noticed_while_another_is_free(lab: Lab, client: OpenAI) -> None:
    for engine in (lab.decoders[0], lab.prefillers[0]):
        engine.faults.status = [429, 429]
        engine.faults.retry_after_s = 7

    answers = [chat().create(client) for _ in range(3)]

    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_broken_engines_are_an_internal_server_error(lab: Lab, client: OpenAI) -> None:
    for engine in lab.decoders:
        engine.faults.status = [500] * 3

    with pytest.raises(openai.InternalServerError) as found:
        chat().create(client)

    assert found.value.status_code == 500
    assert found.value.type == "InternalServerError"


def test_proxy_without_decoders_is_unavailable(lab: Lab) -> None:
    with (
        lab.another_proxy(decoders=False) as worker,
        sdk(f"http://{HOST}:{worker.port}") as client,
        pytest.raises(openai.InternalServerError) as found,
    ):
        chat().create(client)

    assert found.value.status_code == 503
    assert found.value.code == "no_instance"
    assert found.value.response.headers["retry-after"]


def test_body_over_the_limit_is_a_status_error(lab: Lab) -> None:
    with (
        lab.another_proxy("--max-body-bytes", "2000") as worker,
        sdk(f"http://{HOST}:{worker.port}") as client,
    ):
        with pytest.raises(openai.APIStatusError) as found:
            chat("x" * 5000).create(client)
        answer = chat().create(client)

    assert found.value.status_code == 413
    assert found.value.code == "body_too_large"
    assert answer.choices


def test_nobody_listening_is_a_connection_error() -> None:
    with (
        refusing_port() as port,
        sdk(f"http://{HOST}:{port}") as client,
        pytest.raises(openai.APIConnectionError),
    ):
        chat().create(client)


@pytest.mark.parametrize("fault", ["error_after", "drop_after"])
def test_failure_in_a_stream_is_raised_where_it_happens(lab: Lab, fault: str) -> None:
    for engine in lab.decoders:
        setattr(engine.faults, fault, [5])
    chunks: list[Any] = []

    with (
        lab.another_proxy("--continue-lost", "off") as worker,
        sdk(f"http://{HOST}:{worker.port}") as client,
        pytest.raises(openai.APIError) as found,
    ):
        keep(chat(**asked.EXACT).create(client, stream=True), chunks)

    assert not isinstance(found.value, openai.APIStatusError)
    assert found.value.message
    assert 1 <= len(chunks) <= 5
    assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)


def keep(stream: Any, chunks: list[Any]) -> None:
    """Keep each chunk of a stream that may raise at any of them."""
    for chunk in stream:
        chunks.append(chunk)  # noqa: PERF402 - a list that is made at once would be lost


@pytest.mark.parametrize("fault", ["recompute_after", "drop_after"])
def test_stream_that_a_decoder_gives_up_goes_on_unnoticed(
    lab: Lab, client: OpenAI, plain: OpenAI, fault: str
) -> None:
    request = chat("Continue", **asked.EXACT)
    expected = request.create(plain)
    for engine in lab.decoders:
        setattr(engine.faults, fault, [5])

    chunks = list(request.create(client, **asked.USAGE_IN_STREAM))

    assert not all(getattr(engine.faults, fault) for engine in lab.decoders)
    assert text_of(chunks) == expected.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == ["length"]
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_answer_that_a_decoder_gives_up_goes_on_unnoticed(
    lab: Lab, client: OpenAI, plain: OpenAI
) -> None:
    request = chat("Continue", **asked.EXACT)
    for engine in lab.decoders:
        engine.faults.recompute_after = [5]

    answer = request.create(client)

    assert not all(engine.faults.recompute_after for engine in lab.decoders)
    assert lasting(answer) == lasting(request.create(plain))


def test_broken_stream_before_its_output_is_not_noticed(lab: Lab, client: OpenAI) -> None:
    expected = chat().create(client).choices[0].message.content
    for engine in lab.decoders:
        engine.faults.error_after = [1]

    assert text_of(list(chat().create(client, stream=True))) == expected


# --- leaving


def test_stream_closed_early_frees_the_engine(lab: Lab, client: OpenAI) -> None:
    before = written(lab)
    stream = endless().create(client, stream=True)
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert lab.running() == 1
    stream.close()

    wait_until(lambda: not lab.running(), 3.0, lab.left_behind)
    lab.assert_quiescent()
    assert written(lab) - before < 5000


def test_answer_that_takes_too_long_is_left_and_frees_the_engine(lab: Lab, client: OpenAI) -> None:
    before = written(lab)

    with pytest.raises(openai.APITimeoutError):
        endless().create(client, timeout=0.3)

    wait_until(lambda: not lab.running(), 3.0, lab.left_behind)
    lab.assert_quiescent()
    assert written(lab) - before < 5000


def written(lab: Lab) -> int:
    return sum(engine.engine.counters.generation_tokens for engine in lab.decoders)
