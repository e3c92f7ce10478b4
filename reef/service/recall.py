"""What the store knows of earlier answers: their conversations after a restart, and stored responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reef.errors import InvalidRequest, NotFound, ReefError
from reef.inference.chat.service import ChatService
from reef.runtime.interfaces import InferenceRecord, RecordKind, Storage
from reef.service.request import is_name
from reef.service.wire.base import Api, ChatCall
from reef.service.wire.chat import CHAT
from reef.service.wire.messages import MESSAGES
from reef.service.wire.responses import ID_PREFIX, ResponsesCall, Stored, read_stored, referred
from reef.service.wire.responses_writer import RESPONSES

log = logging.getLogger("reef.service")

NEWEST = 500
"""Records of a scenario that are read again after a restart."""
MAX_CHAIN = 2000
"""Responses that one may go on from, each from the one before."""

CONVERSATIONS: Mapping[str, Api] = {api.route: api for api in (CHAT, MESSAGES, RESPONSES)}


class Recall:
    """Reads the newest records of a scenario once, when a conversation first goes on from an earlier answer.

    So a start costs nothing, and neither does a conversation of one turn.
    """

    def __init__(self, storage: Storage, chat: ChatService, started_at: float) -> None:
        """Answers since `started_at` are in memory anyway."""
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
        items: list[dict[str, Any]] = []
        receipts: list[str] = []
        receipt = call.goes_on_from
        while receipt is not None:
            if len(receipts) == MAX_CHAIN:
                raise InvalidRequest(f"at most {MAX_CHAIN} responses may be chained", "previous_response_id")
            stored = await self._stored(scenario, receipt)
            if stored is None:
                raise InvalidRequest(f"there is no response '{ID_PREFIX}{receipt}'", "previous_response_id")
            items = [*stored.items, *stored.response["output"], *items]
            receipts.append(receipt)
            receipt = stored.goes_on_from
        items = [await self._item(scenario, item) for item in items]
        own = [await self._item(scenario, item) for item in call.items]
        return replace(call, items=own).after(items, receipts)

    async def _item(self, scenario: str, item: dict[str, Any]) -> dict[str, Any]:
        """The item, or the stored one that it refers to. Raises InvalidRequest if there is none."""
        name = referred(item)
        if name is None:
            return item
        stored = await self._stored(scenario, name.partition("_")[2].rpartition("_")[0])
        for found in stored.response["output"] if stored is not None else ():
            if found["id"] == name:
                return dict(found)
        raise InvalidRequest(f"there is no stored item {name!r}", "input")

    async def response(self, scenario: str, response_id: str) -> dict[str, Any]:
        """A stored response. Raises NotFound."""
        stored = await self._stored(scenario, response_id.removeprefix(ID_PREFIX))
        if stored is None or not response_id.startswith(ID_PREFIX):
            raise NotFound(f"there is no response {response_id!r}")
        return stored.response

    async def delete(self, scenario: str, response_id: str) -> None:
        """Make a stored response unknown for ever; what was recorded stays. Raises NotFound."""
        await self.response(scenario, response_id)
        receipt = response_id.removeprefix(ID_PREFIX)
        deletion = InferenceRecord(
            record_id=_deletion(receipt),
            scenario=scenario,
            created_at=time.time(),
            route=f"DELETE {RESPONSES.route}",
            request=b"",
            response=b"",
            status=200,
            release_id=None,
            generations=[],
            parent_id=receipt,
            train=False,
        )
        await self._storage.append(deletion)

    async def _stored(self, scenario: str, receipt: str) -> Stored | None:
        if not is_name(receipt):
            return None
        found = await self._storage.get(scenario, [receipt, _deletion(receipt)])
        record = None if _deletion(receipt) in found else found.get(receipt)
        if not isinstance(record, InferenceRecord) or record.route != RESPONSES.route or record.status != 200:
            return None
        if record.purged or record.redacted:  # it is known, but not what it said
            return None
        return read_stored(record.request, record.response)

    async def _read(self, scenario: str) -> None:
        try:
            for record in await self._newest(scenario):
                await self._remember(record)
                await asyncio.sleep(0)  # let other requests have their turn
        except ReefError as error:  # the conversation goes on all the same, only with other tokens
            log.warning("earlier answers of scenario %s are not at hand: %s", scenario, error)
            del self._known[scenario]

    async def _newest(self, scenario: str) -> list[InferenceRecord]:
        """Sequences are shared by all scenarios, so look further back until there are enough."""
        last, width = await self._last_sequence(scenario), NEWEST
        while True:
            found: deque[InferenceRecord] = deque(maxlen=NEWEST)
            after = max(0, last - width)
            while page := await self._page(scenario, after, NEWEST):
                found += page
                after = page[-1].sequence
            if len(found) == NEWEST or width >= last:
                return list(found)
            width *= 8

    async def _last_sequence(self, scenario: str) -> int:
        """By bisection: the store pages in order only."""
        low, high = 0, 1
        while await self._page(scenario, high, 1):
            low, high = high, high * 2
        while low < high:
            middle = (low + high) // 2
            if await self._page(scenario, middle, 1):
                low = middle + 1
            else:
                high = middle
        return low

    async def _page(self, scenario: str, after: int, limit: int) -> list[InferenceRecord]:
        page = await self._storage.page(
            scenario, kind=RecordKind.INFERENCE, after=after, until=self._started_at, limit=limit
        )
        return [record for record in page if isinstance(record, InferenceRecord)]

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


def _deletion(receipt: str) -> str:
    """The id of the record that says that a response was deleted; no client can choose such a one."""
    return f"{receipt}:deleted"
