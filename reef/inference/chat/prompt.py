"""From a conversation to the token ids of its prompt, answers of ours with the ids they were sampled with.

::

    messages ─look up─► answers of ours ─render─► text ─┬─ begins with a recorded text ─► its ids, the rest tokenized
                                                        ├─ ends the turn where we do ───► its ids, what follows it
                                                        └─ leaves something out ────────► ids of contents, in between

The template decides what the model sees; of what it keeps, the sampled ids are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reef.errors import InvalidRequest
from reef.inference.chat.grammars import CallGrammars, any_name
from reef.inference.chat.history import Known, SampledTurns, Turn, context_of
from reef.inference.chat.messages import Conversation, Message, Tool
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import Grammar

_TURN_END = 200
"""Characters at the end of a rendered turn in which its closing token is looked for."""


@dataclass(slots=True)
class Prompt:
    """A prompt and what its answer needs. `text` is what the template made of it; `lead` stands at its end."""

    ids: list[int]
    text: str
    messages: Sequence[Message] = ()  # what was asked, without a prefilled beginning of the answer
    lane: str = ""
    context: bytes = b""
    prefill: str = ""
    lead: str = ""  # of the output, but not sampled: what makes the answer a tool call
    grammar: Grammar | None = None
    starts_reasoning: bool = False
    parent_id: str | None = None  # receipt of the answer that it goes on from
    fork_of: str | None = None  # receipt of the answer that the client replaced


class PromptBuilder:
    def __init__(self, tokenizer: ChatTokenizer, sampled: SampledTurns) -> None:
        self.tokenizer = tokenizer
        self._sampled = sampled
        form = tokenizer.format.tools
        self.special = re.compile(any_name(tokenizer.ids_by_name(tokenizer.special_ids)))
        self._calls = None if form is None else CallGrammars(form, tokenizer.ids_by_name(tokenizer.tag_ids))

    async def build(self, lane: str, conversation: Conversation) -> Prompt:
        """Raises InvalidRequest when the template refuses the conversation."""
        template = self.tokenizer.template
        tools = () if conversation.tool_choice == "none" else conversation.tools
        options = template.options(conversation)
        asked = conversation.messages[:-1] if conversation.prefill else conversation.messages
        context = context_of(tools, options)
        known = self._sampled.look_up(lane, context, asked, conversation.receipts)
        messages = [*_with_ours(asked, known), *conversation.messages[len(asked) :]]
        text = template.render(messages, tools, options, prefill=conversation.prefill)
        starts_reasoning = not conversation.prefill and self.tokenizer.format.starts_reasoning(text)
        lead, grammar = self._lead(conversation, text)
        rendering = _Rendering(self, messages, tools, options, context, text + lead)
        return Prompt(
            ids=await rendering.ids(known),
            text=text + lead,
            messages=asked,
            lane=lane,
            context=context,
            prefill=conversation.messages[-1].content if conversation.prefill else "",
            lead=lead,
            grammar=grammar,
            starts_reasoning=starts_reasoning,
            parent_id=known.parent_id,
            fork_of=known.fork_of,
        )

    def _lead(self, conversation: Conversation, text: str) -> tuple[str, Grammar | None]:
        form, calls, answer = self.tokenizer.format, self._calls, conversation.grammar
        tools, parallel, prefill = conversation.tools, conversation.parallel_calls, conversation.prefill
        skipped = "" if prefill else form.answer_lead(text)
        header = form.tools is not None and form.tools.start == "header"
        if conversation.tool_choice == "required":
            if calls is None:
                raise InvalidRequest("tools cannot be honoured: inference.tool-format is none", "tool_choice")
            named = [tool for tool in tools if conversation.tool_name in (None, tool.name)]
            lead, grammar = calls.forced(named, parallel=parallel)
            return ("" if header else skipped) + lead, grammar
        if answer is None:
            return "", None
        if calls is None or not tools or prefill or conversation.tool_choice == "none":
            return skipped, answer
        begin, lead = (skipped, "") if header else ("", skipped)
        return lead, calls.answer_or_calls(answer, tools, begin, parallel=parallel)


@dataclass(slots=True)
class _Rendering:
    """One conversation as text, on its way to ids."""

    builder: PromptBuilder
    messages: Sequence[Message]
    tools: Sequence[Tool]
    options: dict[str, object]
    context: bytes
    text: str

    async def ids(self, known: Known) -> list[int]:
        tokenizer = self.builder.tokenizer
        for position in sorted(known.turns, reverse=True):
            turn = known.turns[position]
            rest = self.text[turn.text_length :] if turn.begins(self.text) else self._after(position, turn)
            if rest is not None:
                return turn.ids.tolist() + await tokenizer.encode(rest, goes_on=True)
        return await self._spliced(known) if known.turns else await tokenizer.encode(self.text)

    def _after(self, position: int, turn: Turn) -> str | None:
        """What follows a turn that the template writes otherwise than it was sampled. None: nothing can be said."""
        tokenizer = self.builder.tokenizer
        if turn.context != self.context:
            return None
        try:
            whole = tokenizer.template.render(self.messages[: position + 1], self.tools, self.options, ask=False)
        except InvalidRequest:
            return None
        if not self.text.startswith(whole):
            return None
        found = list(self.builder.special.finditer(whole, max(0, len(whole) - _TURN_END)))
        if not found or whole[found[-1].end() :].strip():
            return None
        closing = found[-1]
        closed = turn.ids[-1] in tokenizer.special_ids
        return whole[closing.end() if closed else closing.start() :] + self.text[len(whole) :]

    async def _spliced(self, known: Known) -> list[int]:
        """The text tokenized in pieces, between the contents of our turns as far as they stand in it."""
        tokenizer = self.builder.tokenizer
        ids: list[int] = []
        for piece, turn in self._pieces(known):
            sampled = _ids_of(tokenizer, turn, piece) if turn is not None else None
            ids += await tokenizer.encode(piece, goes_on=bool(ids)) if sampled is None else sampled
        return ids

    def _pieces(self, known: Known) -> list[tuple[str, Turn | None]]:
        """Cut the text where contents of our turns begin and end: a rendering with other contents shows where."""
        turns = {at: turn for at, turn in known.turns.items() if turn.message.content.strip()}
        marks = {at: f"\ue0f0{at}\ue0f1" for at in turns}
        marked = [replace(m, content=marks.get(at, m.content)) for at, m in enumerate(self.messages)]
        try:
            rest = self.builder.tokenizer.template.render(marked, self.tools, self.options)
        except InvalidRequest:
            return [(self.text, None)]
        pieces: list[tuple[str, Turn | None]] = []
        place = 0
        for at in sorted(turns):
            before, found, rest = rest.partition(marks[at])
            content = turns[at].message.content
            start = place + len(before)
            content = next((c for c in (content, content.strip()) if self.text.startswith(c, start)), "")
            if not found or not content or self.text[place:start] != before:
                return [(self.text, None)]
            pieces += [(before, None), (content, turns[at])]
            place = start + len(content)
        return [*pieces, (self.text[place:], None)]


def _with_ours(messages: Sequence[Message], known: Known) -> list[Message]:
    """Our turns as they were, with the reasoning that clients leave out; ids of calls as the client has them."""
    return [
        replace(turn.message, tool_calls=message.tool_calls, name=message.name)
        if (turn := known.turns.get(position)) is not None
        else message
        for position, message in enumerate(messages)
    ]


def _ids_of(tokenizer: ChatTokenizer, turn: Turn, content: str) -> list[int] | None:
    """The sampled ids of `content`, if it begins and ends where tokens do."""
    wanted = content.encode()
    ids = turn.ids[turn.num_prompt :].tolist()
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    start = b"".join(pieces).rfind(wanted)
    if start < 0:
        return None
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    if start in ends and start + len(wanted) in ends:
        return ids[ends.index(start) : len(ends) - 1 - ends[::-1].index(start + len(wanted))]
    return None
