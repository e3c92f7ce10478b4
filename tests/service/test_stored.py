"""Stored chat completions with the official client, on either store, across restarts."""

from __future__ import annotations

import openai
import pytest

from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import Retention
from reef.service import stored
from reef.service.config import Permissions, TokenConfig, digest_of
from tests.inference.chat.templates import THINKING, with_template
from tests.records.values import discard
from tests.service.conftest import running
from tests.service.fakes import FakeDeployment
from tests.service.test_functions import WEATHER as FUNCTION
from tests.service.test_tools import HELLO, THOUGHT, TIME, TWO_CALLS, WEATHER


@pytest.fixture(params=["sqlite", "postgres"])
def started(request, tokenizer, tmp_path):
    """Start a gateway on the same records; the one before has to be stopped."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        server.empty("stored")

    def start():
        deployment = FakeDeployment(tokenizer, tmp_path)
        if request.param == "postgres":
            from reef.records.postgres import PostgresStorage

            deployment.storage = PostgresStorage(server.url, schema="stored")
        return running(deployment)

    return start


def create(gateway, **changes):
    return gateway.openai.chat.completions.create(**{"model": "m", "messages": HELLO, "store": True, **changes})


def create_streamed(gateway, **changes) -> str:
    """The id of what was streamed."""
    return [chunk.id for chunk in create(gateway, stream=True, **changes)][-1]


def ids(gateway, **query) -> list[str]:
    return [completion.id for completion in gateway.openai.chat.completions.list(**query)]


def not_found(call, *args, **options) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        call(*args, **options)
    assert caught.value.body["type"] == "not_found_error" and args[0] in caught.value.body["message"]


def test_what_was_stored_can_be_had_again_after_a_restart(started):
    with started() as gateway:
        sent = create(gateway, metadata={"user": "u"}, logprobs=True)
        streamed = create_streamed(gateway, metadata={"user": "v"}, logprobs=True)
    with started() as gateway:
        found = gateway.openai.chat.completions.retrieve(sent.id)
        assert {**sent.to_dict(), "metadata": {"user": "u"}} == found.to_dict()
        again = gateway.openai.chat.completions.retrieve(streamed)
        assert again.choices == found.choices and again.metadata == {"user": "v"} and again.object == found.object
        assert again.model_extra["reef"] == {"agent_record_id": streamed.removeprefix("chatcmpl-")}
        assert ids(gateway) == [sent.id, streamed]


def test_it_can_be_changed_and_deleted_for_good(started):
    with started() as gateway:
        completions = gateway.openai.chat.completions
        first, second = create(gateway, metadata={"a": "1"}).id, create(gateway, metadata={"a": "1"}).id
        changed = completions.update(first, metadata={"a": "2", "b": "3"})
        assert (changed.id, changed.metadata) == (first, {"a": "2", "b": "3"}) and changed.choices[0].message.content
        completions.update(second, metadata=None)
        completions.update(first, metadata={"a": "4"})
    with started() as gateway:
        completions = gateway.openai.chat.completions
        assert [completions.retrieve(name).metadata for name in (first, second)] == [{"a": "4"}, {}]
        assert [found.metadata for found in completions.list()] == [{"a": "4"}, {}]
        assert ids(gateway, metadata={"a": "4"}) == [first] and ids(gateway, metadata={"a": "1"}) == []
        gone = completions.delete(first)
        assert (gone.id, gone.deleted, gone.object) == (first, True, "chat.completion.deleted")
    with started() as gateway:
        completions = gateway.openai.chat.completions
        for call in (completions.retrieve, completions.delete, completions.messages.list):
            not_found(call, first)
        not_found(completions.update, first, metadata={})
        assert ids(gateway) == [second]
        gateway.chat()
        kept, _, *notes, _ = gateway.records()
        assert kept["response"] and [(note["route"], note["train"]) for note in notes] == [
            *[("POST /v1/chat/completions/{completion_id}", False)] * 3,
            ("DELETE /v1/chat/completions", False),
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [WEATHER, TIME]},
        {"functions": [FUNCTION]},
        {"tools": [WEATHER, TIME], "n": 2, "logprobs": True},
        {"tools": [WEATHER, TIME], "stream_options": {"include_usage": True}},
        {"max_tokens": 3},
    ],
)
def test_a_stream_is_put_together_to_the_whole_answer(gateway, changes):
    gateway.engine.expect(text=TWO_CALLS, chunk=2)
    name = create_streamed(gateway, **changes)
    options = changes.pop("stream_options", None)
    whole, found = create(gateway, **changes).to_dict(), gateway.openai.chat.completions.retrieve(name).to_dict()
    for choice in (*whole["choices"], *found["choices"]):
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    assert found["choices"] == whole["choices"]
    counts = whole["usage"] if options else {key: whole["usage"][key] for key in found["usage"]}
    assert found["usage"] == counts and found["usage"]["total_tokens"] > 3


def test_reasoning_is_put_together_too(tokenizer, tmp_path):
    with running(FakeDeployment(with_template(tokenizer, THINKING), tmp_path)) as gateway:
        gateway.engine.expect(text=THOUGHT, chunk=1)
        found = gateway.openai.chat.completions.retrieve(create_streamed(gateway))
        message = found.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Hm, well.")


@pytest.mark.parametrize("changes", [{}, {"store": False}, {"store": None}])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_to_be_stored_is_not_found(gateway, changes, stream):
    answer = gateway.chat(stream=stream, **changes)
    name = f"chatcmpl-{answer.headers['x-reef-agent-record-id']}"
    not_found(gateway.openai.chat.completions.retrieve, name)
    assert ids(gateway) == [] and len(gateway.records()) == 1


def test_nor_what_never_came_to_an_end(gateway):
    gateway.engine.expect(cut_after=3)
    name = f"chatcmpl-{gateway.chat(stream=True, store=True).headers['x-reef-agent-record-id']}"
    not_found(gateway.openai.chat.completions.retrieve, name)
    assert ids(gateway) == []


def test_nor_what_is_no_completion(gateway):
    response = gateway.openai.responses.create(model="m", input="Hi").id
    receipt = create(gateway).id.removeprefix("chatcmpl-")
    retrieve = gateway.openai.chat.completions.retrieve
    for name in (response, response.replace("resp_", "chatcmpl-"), receipt, "chatcmpl-x", "chatcmpl-", "a b"):
        not_found(retrieve, name)


def test_lists_are_filtered_and_paged(gateway):
    names = [create(gateway, model=f"m{n % 2}", metadata={"half": str(n // 3), "n": str(n)}).id for n in range(6)]
    gateway.chat()
    page = gateway.openai.chat.completions.list(limit=4)
    assert [found.id for found in page.data] == names[:4] and page.has_more
    assert (page.model_extra["first_id"], page.model_extra["last_id"]) == (names[0], names[3])
    assert ids(gateway, limit=1) == names and ids(gateway, order="desc", limit=4) == names[::-1]
    assert ids(gateway, after=names[3]) == names[4:] and ids(gateway, after=names[3], order="desc") == names[2::-1]
    assert ids(gateway, model="m1") == names[1::2] and ids(gateway, model="smollm2") == names
    assert ids(gateway, metadata={"half": "1"}, limit=1) == names[3:] and ids(gateway, metadata={"x": "1"}) == []
    assert ids(gateway, metadata={"half": "1", "n": "4"}, model="m0") == [names[4]]
    empty = gateway.http.get("/v1/chat/completions", params={"model": "none"}).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_a_list_may_be_deleted_from_as_it_is_read(gateway):
    names = [create(gateway).id for _ in range(3)]
    completions = gateway.openai.chat.completions
    assert [completions.delete(found.id).id for found in completions.list(limit=1)] == names
    assert ids(gateway) == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "chatcmpl-x"}, "after"),
        ({"metadata": "a"}, "metadata"),
        ({"model[a]": "b"}, "model"),
        ({"first": "1"}, "first"),
    ],
)
def test_a_bad_query_is_named(gateway, query, field):
    answer = gateway.http.get("/v1/chat/completions", params=query)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_the_newest_records_are_listed(gateway, monkeypatch):
    monkeypatch.setattr(stored, "LISTED", 3)
    names = [create(gateway).id for _ in range(4)]
    create(gateway, extra_headers={"x-reef-scenario": "other"})
    assert ids(gateway) == names[1:]
    gateway.openai.chat.completions.update(names[0], metadata={"a": "b"})
    assert ids(gateway) == names[2:] and gateway.openai.chat.completions.retrieve(names[0]).metadata == {"a": "b"}


def test_what_a_completion_was_asked_with(gateway):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts, "name": "u"}]
    name = create(gateway, messages=turns).id
    first, second = gateway.openai.chat.completions.messages.list(name, limit=1)
    assert (first.id, first.role, first.content, first.content_parts) == (f"{name}-0", "system", "Be brief.", None)
    assert (second.content, second.model_extra["name"]) == ("Hello", "u")
    assert [part.text for part in second.content_parts] == ["Hel", "lo"]
    newest = gateway.openai.chat.completions.messages.list(name, order="desc", limit=1)
    assert [message.id for message in newest.data] == [f"{name}-1"] and newest.has_more


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
        ({"metadata": {}, "store": False}, "store"),
    ],
)
def test_bad_metadata_is_refused(gateway, body, field):
    name = create(gateway).id
    answer = gateway.http.post(f"/v1/chat/completions/{name}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field and len(gateway.records()) == 1


def test_metadata_changes_so_often_and_no_oftener(gateway, monkeypatch):
    monkeypatch.setattr(stored, "MAX_CHANGES", 2)
    completions = gateway.openai.chat.completions
    name = create(gateway).id
    for value in "ab":
        completions.update(name, metadata={"x": value})
    with pytest.raises(openai.ConflictError):
        completions.update(name, metadata={"x": "c"})
    assert completions.retrieve(name).metadata == {"x": "b"}


def test_what_a_scenario_stored_no_other_one_finds(gateway):
    name, other = create(gateway).id, {"extra_headers": {"x-reef-scenario": "other"}}
    completions = gateway.openai.chat.completions
    for call in (completions.retrieve, completions.delete, completions.messages.list):
        not_found(call, name, **other)
    assert ids(gateway, **other) == [] and gateway.scenarios() == ["default"]


def test_a_token_reaches_its_own_scenarios_only(serve):
    tokens = [TokenConfig(digest=digest_of("a"), scenarios=["a"]), TokenConfig(digest=digest_of("b"), scenarios=["b"])]
    with serve(tokens=tokens) as gateway:
        client = gateway.openai.with_options(api_key="a", default_headers={"x-reef-scenario": "a"})
        name = client.chat.completions.create(model="m", messages=HELLO, store=True).id
        assert client.chat.completions.retrieve(name).id == name
        other = client.with_options(api_key="b").chat.completions
        for call in (lambda: other.retrieve(name), lambda: other.delete(name), other.list):
            with pytest.raises(openai.PermissionDeniedError):
                call()


def test_where_recording_is_off_nothing_is_stored_or_changed(gateway):
    off = {"extra_headers": {"x-reef-record": "off"}}
    completions = gateway.openai.chat.completions
    not_found(completions.retrieve, create(gateway, **off).id)
    assert gateway.openai.responses.create(model="m", input="Hi", store=True, **off).store is False
    kept = create(gateway, metadata={"a": "b"}).id
    for call in (lambda: completions.update(kept, metadata={}, **off), lambda: completions.delete(kept, **off)):
        with pytest.raises(openai.PermissionDeniedError, match="recording is off"):
            call()
    assert completions.retrieve(kept).metadata == {"a": "b"} and len(gateway.records()) == 1


def test_a_deployment_that_records_nothing_stores_nothing(serve):
    with serve(permissions=Permissions(record=False)) as gateway:
        not_found(gateway.openai.chat.completions.retrieve, create(gateway).id)
        assert ids(gateway) == []


def test_what_retention_emptied_is_not_found(gateway, run):
    completions = gateway.openai.chat.completions
    names = [create(gateway, metadata={"a": "b"}).id for _ in range(3)]
    completions.update(names[1], metadata={"a": "c"})
    completions.delete(names[2])
    notes = [record["agent_record_id"] for record in gateway.records()[-2:]]
    emptied = [names[0].removeprefix("chatcmpl-"), *notes]

    async def retain() -> None:  # as another process would
        storage = SqliteStorage(gateway.deployment.storage.database.path)
        await storage.open()
        await storage.commit(discard("c", emptied, scenario="default"))
        assert (await storage.purge(Retention(consumed_before=1e12), 10)).records == 3
        await storage.close()

    run(retain())
    not_found(completions.retrieve, names[0])
    not_found(completions.retrieve, names[2])
    [listed] = completions.list().data
    assert (listed.id, listed.metadata) == (names[1], {"a": "c"}) and completions.retrieve(names[1]).metadata == {
        "a": "c"
    }
