"""Rounds of one answer without a socket: a toy engine, and what the proxy does between rounds.

The engine's next token depends on the whole prefix, so whatever a round gets wrong shows.
"""

import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pdproxy.core import sse
from pdproxy.core.answer import Answer
from pdproxy.core.api import Api, parse_generate
from pdproxy.core.chunks import read_event, without_recomputed
from pdproxy.core.jsonfields import join_object, split_object
from pdproxy.core.keeper import Keeper
from pdproxy.core.planner import Abilities, Complete, GiveUp, note_echo, plan
from pdproxy.core.recount import DETOKENIZE, recount
from pdproxy.core.reply import Reply
from pdproxy.core.resume import Way, asks_ids, with_ids
from pdproxy.core.seam import Seam, ending, head
from pdproxy.core.stops import hidden_stops
from pdproxy.errors import RecomputeUnsupported
from pdproxy.sim import chat_wire, completion_wire, template, tokenizer
from pdproxy.sim.config import SimConfig
from pdproxy.sim.jobs import make_job
from pdproxy.sim.model import Generation, Step, prefix_state
from pdproxy.sim.parsing import chat_turn, parse_chat, parse_completion

CONFIG = SimConfig(eos_odds=1 << 30)
THINKER = SimConfig(eos_odds=1 << 30, reasoning=True, reasoning_tokens=9)
ABILITIES = Abilities(reasoning_end_id=tokenizer.THINK_END, max_model_len=8192)


@dataclass
class Engine:
    """Answers bodies; a choice is cut after so many tokens, one number for each round.

    Attributes:
        cuts: tokens after which a round is cut; a round without a number runs to its end.
        steps: how many tokens each event brings, round and round.
        is_lost: a cut is the loss of the decoder, which sends nothing more.
        bodies: what it was asked.
    """

    config: SimConfig = CONFIG
    cuts: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [1])
    is_lost: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def steps_of(self, api, body):
        """Return the parsed job and, for each choice, its steps."""
        parse = parse_chat if api is Api.CHAT else parse_completion
        request = parse(body, f"round{len(self.bodies)}", self.config)
        self.bodies.append(body)
        job = make_job(request, 16, 0.0, None)
        limit = self.cuts.pop(0) if self.cuts else None
        return job, [self._choice(request, index, limit) for index in range(request.n)]

    def _choice(self, request, index, limit):
        prompt = request.prompts[0]
        state = prefix_state(prompt)
        written = Generation(prompt, state, request.sampling, index=index, grammar=request.grammar)
        made = 0
        steps: list[Step] = []
        for turn in count():
            wanted = self.steps[turn % len(self.steps)]
            if limit is not None:
                wanted = min(wanted, limit - made)
            if wanted < 1:
                return steps if self.is_lost else [*steps, written.cut()]
            steps.append(written.advance(wanted))
            made += len(steps[-1].tokens)
            if steps[-1].finish_reason is not None:
                return steps
        raise AssertionError

    def stream(self, api, body):
        """Return the blocks of a stream, one event each; choices take turns."""
        job, choices = self.steps_of(api, body)
        wire = chat_wire.ChatStream if api is Api.CHAT else completion_wire.CompletionStream
        stream = wire(job, self.config)
        blocks = [stream.opening()]
        for turn in range(max(map(len, choices))):
            for index, steps in enumerate(choices):
                if turn < len(steps):
                    blocks.append(stream.step(index, steps[turn]))
        blocks.append(stream.closing())
        return sse.split_block(b"".join(blocks))

    def whole(self, api, body):
        job, choices = self.steps_of(api, body)
        wire = chat_wire if api is Api.CHAT else completion_wire
        return wire.whole(job, choices, self.config)


@dataclass
class Proxy:
    """Gives a client one answer, whatever the engine does."""

    engine: Engine
    abilities: Abilities = ABILITIES
    ways: list[Way] = field(default_factory=list)
    asks_ids: bool = True

    def stream(self, api, body):
        """Return the bytes that the client gets."""
        request = parse_generate(api, json.dumps(body).encode())
        answer = Answer()
        keeper = Keeper(answer, shows_ids=asks_ids(request), stops=hidden_stops(request))
        asked = with_ids(request) if self.asks_ids else request
        events = self.engine.stream(api, _body(asked))
        out = b"".join(self._first(events, keeper, request))
        answer.prompt_tokens, answer.cached_tokens = _prompt_tokens(api, body, self.engine), 0
        cut = _open(request, answer)
        if not cut:
            return out + sse.DONE
        note_echo(request, answer)
        for index in cut:
            out += self._finish(request, answer, index, None)
        usage = {**head(request, answer), "choices": [], "usage": answer.usage()}
        if body.get("stream_options", {}).get("include_usage"):
            out += sse.encode_data(json.dumps(usage).encode())
        return out + sse.DONE

    def whole(self, api, body):
        """Return the JSON that a client gets that does not stream."""
        request = parse_generate(api, json.dumps(body).encode())
        asked = with_ids(request) if self.asks_ids else request
        reply = self.engine.whole(api, _body(asked))
        cut = {
            choice["index"]
            for choice in json.loads(reply)["choices"]
            if choice["stop_reason"] == "recomputed"
        }
        answer = Answer(prompt_tokens=_prompt_tokens(api, body, self.engine), cached_tokens=0)
        keeper = Keeper(answer, shows_ids=asks_ids(request))
        if not cut:
            return keeper.hide(reply)
        joined = Reply(request, answer, split_object(reply), cut)
        note_echo(request, answer)
        for index in sorted(cut):
            self._finish(request, answer, index, joined)
        return joined.composed()

    def _first(self, events, keeper, request):
        has_content = False
        for event in events:
            seen = read_event(event, user_stops=request.stops)
            kept = keeper.take(event) if has_content else None
            has_content |= seen.has_content
            if kept is not None:
                yield kept
                continue
            if seen.is_done:
                continue
            if seen.usage is not None and not seen.indexes and _open(request, keeper.answer):
                keeper.note(event)
                continue
            yield keeper.note(_undone(event, seen.recomputed), seen.recomputed)
        if not self.engine.is_lost:
            keeper.answer.give_back(_open(request, keeper.answer))

    def _finish(self, request, answer, index, reply):
        out = b""
        for _ in range(40):
            self._recount(request, answer, index)
            found = plan(request, answer, index, self.abilities, is_delivered=reply is None)
            if isinstance(found, GiveUp):
                raise RecomputeUnsupported(found.why)
            if isinstance(found, Complete):
                event = ending(request, answer, index, found.finish_reason)
                return out + _deliver(event, reply)
            self.ways.append(found.way)
            if found.way is Way.AGAIN and reply is not None:
                reply.restart(index)
            seam = Seam(request, answer, index, found)
            out += self._round(seam, found.request, reply)
            if seam.end.is_final:
                return out
            if not self.engine.is_lost:
                answer.give_back([index])
        raise AssertionError("too many rounds")

    def _recount(self, request, answer, index):
        """Answer what is asked of the tokenizer."""
        asking, said = recount(request, answer, index, self.abilities.reasoning_end_id), None
        try:
            while True:
                question = asking.send(said)
                said = tokenized(question, self.engine.config)
        except StopIteration:
            return

    def _round(self, seam, request, reply):
        out = b""
        for event in self.engine.stream(request.api, _body(request)):
            seen = read_event(event, user_stops=request.stops)
            out += _deliver(seam.rewrite(_undone(event, seen.recomputed)), reply)
            if seam.end.is_stopped:
                break
        return out


def tokenized(question, config=CONFIG):
    """Return what an engine says to a question about tokens."""
    fields = _body(question)
    if question.path == DETOKENIZE:
        return {"prompt": tokenizer.decode(fields["tokens"])}
    is_chat = "messages" in fields
    text = template.render(chat_turn(fields, config)) if is_chat else fields["prompt"]
    return {"count": len(tokenizer.encode(text))}


def _undone(event, recomputed):
    return without_recomputed(event, recomputed) if recomputed else event


def _open(request, answer):
    """Return the choices without an end."""
    return [i for i in range(request.choices) if answer.choice(i).finish_reason is None]


def _deliver(block, reply):
    if reply is None:
        return block
    for event in sse.split_block(block):
        reply.add(json.loads(sse.data_of(event)))
    return b""


def _body(request):
    return json.loads(join_object(request.fields))


def _prompt_tokens(api, body, engine):
    parse = parse_chat if api is Api.CHAT else parse_completion
    return parse(body, None, engine.config).prompt_tokens


def seen_by_client(stream):
    """Return what a client makes of a stream: each choice, the usage, and what all events share."""
    choices: dict[int, dict[str, Any]] = {}
    usage, heads, roles = None, set(), 0
    assert stream.endswith(sse.DONE)
    assert stream.count(sse.DONE) == 1
    for event in sse.split_block(stream.removesuffix(sse.DONE)):
        chunk = json.loads(sse.data_of(event))
        heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        if not chunk["choices"]:
            assert usage is None
            usage = chunk["usage"]
        for choice in chunk["choices"]:
            roles += "role" in choice.get("delta", {})
            _join(choices.setdefault(choice["index"], _empty()), choice)
    return {"choices": choices, "usage": usage, "heads": heads, "roles": roles}


def _empty():
    return {
        "content": "",
        "reasoning": "",
        "calls": {},
        "ids": [],
        "logprobs": [],
        "finish_reason": None,
        "stop_reason": None,
    }


def _join(known, choice):
    delta = choice.get("delta", choice)
    known["content"] += delta.get("content") or delta.get("text") or ""
    known["reasoning"] += delta.get("reasoning") or ""
    known["ids"] += choice.get("token_ids") or []
    known["logprobs"] += flat_logprobs(choice.get("logprobs"))
    for piece in delta.get("tool_calls") or []:
        call = known["calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
        call["name"] += piece["function"].get("name") or ""
        call["arguments"] += piece["function"].get("arguments") or ""
    if choice["finish_reason"] is not None:
        assert known["finish_reason"] is None, "one end"
        known["finish_reason"] = choice["finish_reason"]
        known["stop_reason"] = choice["stop_reason"]


def flat_logprobs(logprobs):
    """Return log-probabilities as one entry per token."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
    )


def whole_by_client(body):
    """Return what a client makes of a whole reply."""
    reply = json.loads(body)
    choices = {}
    for choice in reply["choices"]:
        known = choices[choice["index"]] = _empty()
        message = choice.get("message", choice)
        known["content"] = message.get("content") or message.get("text") or ""
        known["reasoning"] = message.get("reasoning") or ""
        known["calls"] = {
            place: {key: call["function"][key] for key in ("name", "arguments")}
            for place, call in enumerate(message.get("tool_calls") or [])
        }
        known["ids"] = choice["token_ids"] or []
        known["logprobs"] = flat_logprobs(choice["logprobs"])
        known["finish_reason"] = choice["finish_reason"]
        known["stop_reason"] = choice["stop_reason"]
    return {"choices": choices, "usage": reply["usage"]}
