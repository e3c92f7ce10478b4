"""Stored answers: responses and chat completions that their clients may have again.

Records are the source. A deletion, or new metadata, is itself a record; the answer's own never changes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reef.errors import Conflict, InvalidRequest, NotFound
from reef.runtime.interfaces import InferenceRecord, RecordKind, Storage
from reef.service.request import is_name
from reef.service.wire import chat, responses
from reef.service.wire.chat import CHAT
from reef.service.wire.openai import PageQuery, page_of
from reef.service.wire.responses import referred
from reef.service.wire.responses_writer import RESPONSES
from reef.service.wire.stored_chat import (
    Asked,
    CompletionsQuery,
    completion_of,
    messages_of,
    read_asked,
)
from reef.service.wire.stored_responses import Stored, read_stored

Kept = TypeVar("Kept")
Page = tuple[list[dict[str, Any]], bool]
"""Items, and whether more follow."""

MAX_CHAIN = 2000
"""Responses that one may go on from, each from the one before."""
MAX_CHANGES = 100
"""How often the metadata of one completion may change."""
LISTED = 1000
"""Records of a scenario, its newest, among which completions are listed: no index knows which ones are stored."""

_CHANGE = f"POST {CHAT.route}/{{completion_id}}"
_PAGE = 25  # records read at once: to read one holds others up for a while


class StoredAnswers:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._listing = asyncio.Lock()  # a list reads many records: one at a time

    # ------------------------------------------------------------------ responses

    async def response(self, scenario: str, response_id: str) -> Stored:
        """Raises NotFound."""
        stored = await self.find_response(scenario, _receipt(response_id, responses.ID_PREFIX))
        if stored is None:
            raise NotFound(f"there is no response {response_id!r}")
        return stored

    async def find_response(self, scenario: str, receipt: str) -> Stored | None:
        found = await self._find(scenario, RESPONSES.route, receipt)
        return None if found is None else read_stored(found[0].request, found[0].response)

    async def chain(self, scenario: str, receipt: str | None) -> tuple[list[Stored], str | None]:
        """A response and those that it goes on from, oldest first; and the receipt of one that is not there, if any."""
        found: deque[Stored] = deque()
        while receipt is not None:
            if len(found) == MAX_CHAIN:
                raise InvalidRequest(f"at most {MAX_CHAIN} responses may be chained", "previous_response_id")
            stored = await self.find_response(scenario, receipt)
            if stored is None:
                break
            found.appendleft(stored)
            receipt = stored.goes_on_from
        return list(found), receipt

    async def item(self, scenario: str, item: dict[str, Any]) -> dict[str, Any] | None:
        """The item, or the stored one that it refers to."""
        name = referred(item)
        if name is None:
            return item
        stored = await self.find_response(scenario, name.partition("_")[2].rpartition("_")[0])
        return None if stored is None else stored.item(name)

    async def input_items(self, scenario: str, response_id: str, query: PageQuery) -> Page:
        """What a response was asked with, and all that it goes on from that is still there. Raises NotFound."""
        last = await self.response(scenario, response_id)
        before, _ = await self.chain(scenario, last.goes_on_from)
        items = [item for stored in before for item in (*stored.listed, *stored.response["output"])]
        page, more = page_of([(item["id"], item) for item in (*items, *last.listed)], query)
        return [await self.item(scenario, item) or item for item in page], more

    async def delete_response(self, scenario: str, response_id: str) -> None:
        """Make a stored response unknown for ever; what was recorded stays. Raises NotFound."""
        receipt = (await self.response(scenario, response_id)).receipt
        await self._note(scenario, _deletion(receipt), f"DELETE {RESPONSES.route}", receipt)

    # ------------------------------------------------------------------ chat completions

    async def completion(self, scenario: str, completion_id: str) -> dict[str, Any]:
        """Raises NotFound."""
        record, asked, _ = await self._completion(scenario, completion_id)
        return _shown(record, asked)

    async def messages(self, scenario: str, completion_id: str, query: PageQuery) -> Page:
        """What a completion was asked with. Raises NotFound."""
        record, _, _ = await self._completion(scenario, completion_id)
        return page_of([(turn["id"], turn) for turn in messages_of(record.request, completion_id)], query)

    async def completions(self, scenario: str, query: CompletionsQuery) -> Page:
        """Those among the newest records of the scenario that the query is about."""
        async with self._listing:
            known = await newest(self._storage, scenario, LISTED, _listed)
        places: dict[str, Asked | None] = {}
        for receipt, said in filter(None, known):
            if isinstance(said, Asked):
                places[receipt] = said
            elif (asked := places.get(receipt)) is not None:
                asked.metadata = said
                places[receipt] = None if said is None else asked
        ids = [
            (chat.ID_PREFIX + receipt, receipt if asked is not None and asked.matches(query) else None)
            for receipt, asked in places.items()
        ]
        receipts, more = page_of(ids, query)
        shown = []
        for receipt in receipts:
            record, asked = (await self._storage.get(scenario, [receipt])).get(receipt), places[receipt]
            if isinstance(record, InferenceRecord) and _is_readable(record) and asked is not None:
                shown.append(_shown(record, asked))
        return shown, more

    async def change(self, scenario: str, completion_id: str, metadata: dict[str, str]) -> dict[str, Any]:
        """The completion with this metadata in place of its own. Raises NotFound, Conflict."""
        record, asked, changes = await self._completion(scenario, completion_id)
        if changes == MAX_CHANGES:
            raise Conflict(f"the metadata of {completion_id!r} was changed {MAX_CHANGES} times: it stays as it is")
        receipt = record.record_id
        await self._note(scenario, _change(receipt, changes + 1), _CHANGE, receipt, metadata)
        asked.metadata = metadata
        return _shown(record, asked)

    async def delete_completion(self, scenario: str, completion_id: str) -> None:
        """Make a stored completion unknown for ever; what was recorded stays. Raises NotFound."""
        record, _, _ = await self._completion(scenario, completion_id)
        await self._note(scenario, _deletion(record.record_id), f"DELETE {CHAT.route}", record.record_id)

    async def _completion(self, scenario: str, completion_id: str) -> tuple[InferenceRecord, Asked, int]:
        """Its record, how it was asked for, with its metadata as it is now, and how often that changed."""
        found = await self._find(scenario, CHAT.route, _receipt(completion_id, chat.ID_PREFIX), MAX_CHANGES)
        asked = None if found is None else read_asked(found[0].request, found[0].response)
        if found is None or asked is None:
            raise NotFound(f"there is no stored completion {completion_id!r}")
        record, *changes = found
        if changes:
            asked.metadata = changes[-1].tags
        return record, asked, len(changes)

    # ------------------------------------------------------------------ records

    async def _find(self, scenario: str, route: str, receipt: str, changes: int = 0) -> list[InferenceRecord] | None:
        """The record of an answer to this route and those of its changes, in order; None once it is deleted."""
        if not is_name(receipt):
            return None
        names = [receipt, *(_change(receipt, number) for number in range(1, changes + 1))]
        found = await self._storage.get(scenario, [_deletion(receipt), *names])
        records = [record for name in names if isinstance(record := found.get(name), InferenceRecord)]
        if _deletion(receipt) in found or receipt not in found or not records:
            return None
        return records if records[0].route == route and _is_readable(records[0]) else None

    async def _note(
        self, scenario: str, record_id: str, route: str, receipt: str, tags: dict[str, str] | None = None
    ) -> None:
        """Record what is done to an answer. Retention leaves tags as they are."""
        await self._storage.append(
            InferenceRecord(
                record_id=record_id,
                scenario=scenario,
                created_at=time.time(),
                route=route,
                request=b"",
                response=b"",
                status=200,
                release_id=None,
                generations=[],
                tags=tags or {},
                parent_id=receipt,
                train=False,
            )
        )


async def newest(
    storage: Storage,
    scenario: str,
    number: int,
    keep: Callable[[InferenceRecord], Kept],
    until: float | None = None,
) -> list[Kept]:
    """What `keep` makes of the newest records of answers, at most `number`, in order; of those before `until`.

    Sequences are shared by all scenarios, so it looks further and further back until there are enough.
    """

    async def page(after: int, limit: int) -> list[InferenceRecord]:
        records = await storage.page(scenario, kind=RecordKind.INFERENCE, after=after, until=until, limit=limit)
        return [record for record in records if isinstance(record, InferenceRecord)]

    last = await _last_sequence(page)
    found: list[Kept] = []
    high, width = last, number
    while len(found) < number and high > 0:
        low = max(0, last - width)
        part: list[Kept] = []
        after = low
        while after < high and (records := await page(after, _PAGE)):
            part += [keep(record) for record in records if record.sequence <= high]
            after = records[-1].sequence
        found = part + found
        high, width = low, width * 2
    return found[-number:]


async def _last_sequence(page: Callable[[int, int], Awaitable[list[InferenceRecord]]]) -> int:
    """By bisection: the store pages in order only."""
    low, high = 0, 1
    while await page(high, 1):
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if await page(middle, 1):
            low = middle + 1
        else:
            high = middle
    return low


def _receipt(answer_id: str, prefix: str) -> str:
    return answer_id.removeprefix(prefix) if answer_id.startswith(prefix) else ""


def _is_readable(record: InferenceRecord) -> bool:
    """Else it is known, but not what it said, or a provider said it."""
    return record.status == 200 and bool(record.generations) and not record.purged and not record.redacted


def _listed(record: InferenceRecord) -> tuple[str, Asked | dict[str, str] | None] | None:
    """A stored completion by its receipt, its new metadata, or (None) its end."""
    if record.route == CHAT.route and _is_readable(record):
        asked = read_asked(record.request, record.response)
        return None if asked is None else (record.record_id, asked)
    receipt = record.record_id.partition(":")[0]  # retention leaves nothing else that says whose it is
    if record.route == _CHANGE:
        return receipt, record.tags
    return (receipt, None) if record.route == f"DELETE {CHAT.route}" else None


def _shown(record: InferenceRecord, asked: Asked) -> dict[str, Any]:
    return {**completion_of(record.response, record.generations), "metadata": asked.metadata or {}}


# Of these no client can choose one.


def _deletion(receipt: str) -> str:
    """The id of the record that says that an answer was deleted."""
    return f"{receipt}:deleted"


def _change(receipt: str, number: int) -> str:
    """The id of the record with the metadata of the answer's change of this number, from 1 on."""
    return f"{receipt}:metadata:{number}"
