"""What the store knows of earlier answers: their conversations after a restart, and what a response goes on from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reef.errors import InvalidRequest, ReefError
from reef.inference.chat.service import ChatService
from reef.runtime.interfaces import InferenceRecord, Storage
from reef.service.stored import StoredAnswers, newest
from reef.service.wire.base import Api, ChatCall
from reef.service.wire.chat import CHAT
from reef.service.wire.messages import MESSAGES
from reef.service.wire.responses import ID_PREFIX, ResponsesCall, referred
from reef.service.wire.responses_writer import RESPONSES

log = logging.getLogger("reef.service")

NEWEST = 500
"""Records of a scenario that are read again after a restart."""

CONVERSATIONS: Mapping[str, Api] = {api.route: api for api in (CHAT, MESSAGES, RESPONSES)}


class Recall:
    """Reads the newest records of a scenario once, when a conversation first goes on from an earlier answer.

    So a start costs nothing, and neither does a conversation of one turn.
    """

    def __init__(self, stored: StoredAnswers, storage: Storage, chat: ChatService, started_at: float) -> None:
        """Answers since `started_at` are in memory anyway."""
        self._stored = stored
        self._storage = storage
        self._chat = chat
        self._started_at = started_at
        self._known: dict[str, asyncio.Task[None]] = {}

    async def prepare(self, scenario: str, call: ChatCall) -> None:
        """Return when the answers that the call may go on from are in memory."""
        conversation = call.conversation
        if conversation is None or all(message.role != "assistant" for message in conversation.messages):
            return
        task = self._known.get(scenario)
        if task is None:
            task = self._known[scenario] = asyncio.create_task(self._read(scenario))
        await asyncio.shield(task)

    async def goes_on(self, scenario: str, call: ChatCall) -> ChatCall:
        """The call with all that came before it. Raises InvalidRequest if that is not stored."""
        if not isinstance(call, ResponsesCall) or not call.refers:
            return call
        before, missing = await self._stored.chain(scenario, call.goes_on_from)
        if missing is not None:
            raise InvalidRequest(f"there is no response '{ID_PREFIX}{missing}'", "previous_response_id")
        items = [item for stored in before for item in (*stored.items, *stored.response["output"])]
        items = [await self._item(scenario, item) for item in items]
        own = [await self._item(scenario, item) for item in call.items]
        return replace(call, items=own).after(items, [stored.receipt for stored in before])

    async def _item(self, scenario: str, item: dict[str, Any]) -> dict[str, Any]:
        """The item, or the stored one that it refers to. Raises InvalidRequest if there is none."""
        found = await self._stored.item(scenario, item)
        if found is None:
            raise InvalidRequest(f"there is no stored item {referred(item)!r}", "input")
        return found

    async def _read(self, scenario: str) -> None:
        try:
            for record in await newest(self._storage, scenario, NEWEST, lambda record: record, self._started_at):
                await self._remember(record)
                await asyncio.sleep(0)  # let other requests have their turn
        except ReefError as error:  # the conversation goes on all the same, only with other tokens
            log.warning("earlier answers of scenario %s are not at hand: %s", scenario, error)
            del self._known[scenario]

    async def _remember(self, record: InferenceRecord) -> None:
        api = CONVERSATIONS.get(record.route)
        if api is None or record.status != 200 or record.purged or record.redacted:
            return
        try:
            call = await self.goes_on(record.scenario, api.parse(record.request))
            request = call.request(record.record_id, record.record_id, record.scenario)
            await self._chat.recall(request, record.generations, record.record_id)
        except InvalidRequest:  # another model's template took what this one refuses
            log.debug("record %s is not a conversation of this model", record.record_id)
