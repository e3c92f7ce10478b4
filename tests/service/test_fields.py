"""Every field that the official clients can send is known: honoured, harmless, or refused by name."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_function_message_param,
    chat_completion_tool_message_param,
    chat_completion_user_message_param,
    completion_list_params,
    completion_update_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.completions import message_list_params
from openai.types.responses import (
    function_tool_param,
    input_item_list_params,
    input_token_count_params,
    response_create_params,
    response_function_tool_call_param,
    response_input_item_param,
    response_reasoning_item_param,
    response_retrieve_params,
)

from reef.service.wire import chat, completions, messages, openai, responses, stored_chat, stored_responses

PAIRS = [
    (chat_params.CompletionCreateParamsStreaming, chat.ChatBody),
    (chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam, chat.AssistantTurn),
    (chat_completion_user_message_param.ChatCompletionUserMessageParam, chat.UserTurn),
    (chat_completion_tool_message_param.ChatCompletionToolMessageParam, chat.ToolTurn),
    (chat_completion_function_message_param.ChatCompletionFunctionMessageParam, chat.FunctionTurn),
    (chat_params.Function, openai.FunctionBody),
    (completion_create_params.CompletionCreateParamsStreaming, completions.CompletionBody),
    (response_create_params.ResponseCreateParamsStreaming, responses.ResponsesBody),
    (function_tool_param.FunctionToolParam, responses.FunctionTool),
    (response_function_tool_call_param.ResponseFunctionToolCallParam, responses.CallItem),
    (response_input_item_param.FunctionCallOutput, responses.OutputItem),
    (response_reasoning_item_param.ResponseReasoningItemParam, responses.ReasoningItem),
    (response_retrieve_params.ResponseRetrieveParamsStreaming, stored_responses.ResponseQuery),
    (input_item_list_params.InputItemListParams, stored_responses.ItemsQuery),
    (input_token_count_params.InputTokenCountParams, responses.InputTokensBody),
    (completion_list_params.CompletionListParams, stored_chat.CompletionsQuery),
    (completion_update_params.CompletionUpdateParams, stored_chat.MetadataBody),
    (message_list_params.MessageListParams, openai.PageQuery),
    (message_create_params.MessageCreateParamsStreaming, messages.MessagesBody),
    (message_count_tokens_params.MessageCountTokensParams, messages.CountBody),
]


def fields_of(kind: type) -> set[str]:
    import msgspec

    return {field.encode_name for field in msgspec.structs.fields(kind)} | {kind.__struct_config__.tag_field or ""}


@pytest.mark.parametrize(("sent", "read"), PAIRS, ids=lambda kind: kind.__name__)
def test_no_field_is_unknown(sent, read):
    hints = {"async" if name == "async_" else name for name in get_type_hints(sent)}
    assert hints - fields_of(read) == set()
