"""A model's own chat template: what it knows of, and conversations as its text.

Rendering is sandboxed by transformers (Jinja's immutable sandbox, plain JSON values only). A template that knows no
tools gets them in a system turn, and calls and results as text, in the format that most models have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from reef.errors import InvalidRequest
from reef.inference.chat.messages import Conversation, Message, Tool

_TOOLS_TEXT = """# Tools

You may call one or more of these functions. Their signatures are JSON schemas within <tools></tools>:
<tools>
{signatures}
</tools>

To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>"""


class ChatTemplate:
    """Renders conversations with the template of a loaded `transformers` tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.text = "\n".join(template.values()) if isinstance(template, dict) else str(template)
        self.knows_tools = self._reads("tools")
        self.knows_effort = self._reads("reasoning_effort")
        self._switch = next((name for name in ("enable_thinking", "thinking") if self._reads(name)), None)
        self._short_ids = re.search(r"\blength\)?\s*!=\s*9\b", self.text) is not None  # Mistral's tool call ids

    def _reads(self, variable: str) -> bool:
        return re.search(rf"(?<![\w.'\"]){variable}\b", self.text) is not None

    def options(self, conversation: Conversation) -> dict[str, Any]:
        """The variables that the template gets. Raises InvalidRequest for an effort that it knows nothing of."""
        thinking, effort = conversation.thinking, conversation.effort
        if conversation.grammar is not None:
            thinking = False
        found: dict[str, Any] = {}
        if effort is not None:
            if self.knows_effort and effort != "none":
                found["reasoning_effort"] = effort
            elif self._switch is not None:
                thinking = effort != "none" if thinking is None else thinking
            elif effort != "none":
                raise InvalidRequest("the model's chat template knows no reasoning effort", "reasoning_effort")
        if self._switch is not None and thinking is not None:
            found[self._switch] = thinking
        return found

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        ask: bool = True,
        prefill: bool = False,
    ) -> str:
        """The conversation up to where the assistant's turn begins; without `ask`, up to the end of its last turn.

        With `prefill` the last message is left open, to be continued. Raises InvalidRequest when the template refuses
        (it may want alternating roles, for example).
        """
        from jinja2 import TemplateError

        if not self.knows_tools:
            messages = _without_tools(messages, tools)
        turns = [message.for_template() for message in messages]
        if self._short_ids:
            _shorten_ids(turns)
        given = {"tools": [tool.for_template() for tool in tools]} if tools and self.knows_tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=ask and not prefill,
                continue_final_message=prefill,
                **given,
                **(options or {}),
            )
            text.encode()  # arguments are JSON inside of JSON: half a character can hide there
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            raise InvalidRequest(f"the model's chat template refuses this conversation: {error}", "messages") from error
        except RecursionError as error:
            raise InvalidRequest("the conversation is nested too deeply for the chat template", "messages") from error
        return text


def written_call(name: str, arguments: str) -> str:
    """A call as text, for templates that know none."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _without_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Tools, calls and results as text of turns that every template knows."""
    turns: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if turns and turns[-1].role == "user" and turns[-1].content.startswith("<tool_response>"):
                turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n{result}")
            else:
                turns.append(Message(role="user", content=result))
        elif message.tool_calls:
            calls = [written_call(call.name, call.arguments) for call in message.tool_calls]
            content = "\n".join([*([message.content] if message.content else []), *calls])
            turns.append(replace(message, content=content, tool_calls=()))
        else:
            turns.append(message)
    if not tools:
        return turns
    signatures = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    told = _TOOLS_TEXT.format(signatures=signatures)
    if turns and turns[0].role == "system":
        return [replace(turns[0], content=f"{turns[0].content}\n\n{told}"), *turns[1:]]
    return [Message(role="system", content=told), *turns]


def _shorten_ids(turns: list[dict[str, Any]]) -> None:
    """Nine letters or digits, the same for the same id."""

    def short(call_id: str) -> str:
        return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]

    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["id"] = short(call["id"])
        if "tool_call_id" in turn:
            turn["tool_call_id"] = short(turn["tool_call_id"])
