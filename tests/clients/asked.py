"""Requests that SDK users make, and what of an answer must not depend on who answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tests.clients.lab import MODEL

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather forecast.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
CITY_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
            "required": ["name", "people"],
            "additionalProperties": False,
        },
    },
}
USAGE_IN_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# A field of vLLM's own: the answer is exactly as long as its limit.
EXACT: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
# Sampled anew for each answer, or a matter of which engine has which prefix in its cache.
_VOLATILE = frozenset({"id", "created", "created_at", "item_id", "prompt_tokens_details"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of an SDK user."""

    api: Literal["chat", "completions"]
    fields: dict[str, Any]

    def create(self, client: Any, **more: Any) -> Any:
        """Ask; what an asynchronous client returns is to be awaited."""
        resource = client.chat.completions if self.api == "chat" else client.completions
        return resource.create(model=MODEL, **{**self.fields, **more})


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(text: str = "Bonjour", **fields: Any) -> Asked:
    return Asked("chat", {"messages": says(text), "max_completion_tokens": 24, **fields})


def completion(prompt: Any = "Il était une fois", **fields: Any) -> Asked:
    return Asked("completions", {"prompt": prompt, "max_tokens": 12, **fields})


def endless(tokens: int = 6000, **fields: Any) -> Asked:
    """Return a chat that nobody waits out: seconds long, and of an exactly known length."""
    return chat("Raconte", max_completion_tokens=tokens, **EXACT, **fields)


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote Candide?"},
    {"role": "assistant", "content": "Voltaire."},
    {"role": "user", "content": "And when?"},
]
LOOK = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PIXEL}},
        ],
    }
]
CALLED = [
    *says("Weather?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Nancy","days":1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
]
NAMED = {"type": "function", "function": {"name": "weather"}}

ALL: dict[str, Asked] = {
    "chat": chat(),
    "turns": chat(messages=TURNS),
    "image": chat(messages=LOOK),
    "no-limit": chat(max_completion_tokens=None),
    "old-limit": Asked("chat", {"messages": says("Bonjour"), "max_tokens": 5}),
    "greedy": chat(temperature=0),
    "seeded": chat(seed=7, temperature=0.7, top_p=0.9),
    "stop": chat(stop=["."], max_completion_tokens=200),
    "choices": chat(n=2, **EXACT),
    "logprobs": chat(logprobs=True, top_logprobs=3),
    "tools-unused": chat(tools=[WEATHER, CLOCK]),
    "tools-auto": chat("Please use the tool.", tools=[WEATHER], max_completion_tokens=None),
    "tools-required": chat(tools=[WEATHER], tool_choice="required", max_completion_tokens=None),
    "tools-named": chat(tools=[CLOCK, WEATHER], tool_choice=NAMED, max_completion_tokens=None),
    "tool-result": chat(messages=CALLED, tools=[WEATHER]),
    "json-schema": chat(response_format=CITY_SCHEMA, max_completion_tokens=None),
    "json-object": chat(response_format={"type": "json_object"}, max_completion_tokens=None),
    "completion": completion(),
    "completion-logprobs": completion(logprobs=2),
    "completion-choices": completion(n=2),
    "completion-prompts": completion(["un", "deux", "trois"]),
    "completion-ids": completion([11, 12, 13, 14]),
    "completion-echo": completion(echo=True),
}


def lasting(answer: Any) -> Any:
    """Return the answer, or list of chunks, as plain data without what differs between answers."""
    if isinstance(answer, list):
        return [lasting(item) for item in answer]
    plain = answer.model_dump() if hasattr(answer, "model_dump") else answer
    if isinstance(plain, dict):
        return {
            key: lasting(value)
            for key, value in plain.items()
            if key not in _VOLATILE and value is not None
        }
    return plain


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Return the text of one choice of a stream of chat chunks."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)
