"""Several gateways on one PostgreSQL database under load, one of them killed again and again: is anything lost?

    python -m benchmarks.load [--seconds 60] [--gateways 2] [--clients 16] [--kill-every 10] [--json FILE]

Each gateway is `reef serve` in front of a provider that this program plays. Clients ask with ids of their own; whatever
does not come back as 200 is asked again with the same id, of whichever gateway comes next. Every tenth answer is asked
for once more elsewhere, and every answer is reported. In the end the database must hold each acknowledged answer and
report, once, as the client saw it. Exit code 1 if it does not. PostgreSQL is started from the binaries on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from reef.demo.server import Server
from reef.records.opening import storage_at
from reef.runtime.interfaces import InferenceRecord, ReportRecord
from tests.postgres_server import running_server

RECEIPT = "x-reef-agent-record-id"
START_SECONDS = 300.0
GIVE_UP_SECONDS = 120.0  # for one request, over all of its attempts


def serve_answers(port: multiprocessing.connection.Connection) -> None:
    """A provider of chat completions: each answer says what was asked, whole or as a stream."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = json.loads(await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0])))
                said = {"role": "assistant", "content": body["messages"][-1]["content"]}
                choice = {"index": 0, "finish_reason": "stop"}
                if body.get("stream"):
                    kind, end = "text/event-stream", b"data: [DONE]\n\n"
                    content = b"data: " + json.dumps({"choices": [{**choice, "delta": said}]}).encode() + b"\n\n" + end
                else:
                    kind, content = "application/json", json.dumps({"choices": [{**choice, "message": said}]}).encode()
                start = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
                writer.write(start.encode() + content)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(converse, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def provider() -> Iterator[str]:
    """The URL of a provider in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_answers, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(START_SECONDS):
            raise TimeoutError("the provider did not start")
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


class Gateway:
    """One `reef serve`; may be killed and started again, and is somewhere else then."""

    def __init__(self, number: int, directory: Path, flags: dict[str, object]) -> None:
        own = {"reef.port": 0, "reef.data-dir": directory / f"data-{number}", **flags}
        self._arguments = [f"--{key}={value}" for key, value in own.items()]
        self._directory = directory / f"gateway-{number}"
        self._runs = itertools.count(1)
        self.server: Server | None = None
        self.up = False

    def start(self) -> None:
        self.server = Server(self._arguments, self._directory / f"run-{next(self._runs)}.log")
        self.server.start()
        for _ in self.server.starting(START_SECONDS):
            pass
        self.up = True

    def kill(self) -> None:
        self.up = False
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    @property
    def process(self):
        return self.server._process


@dataclass
class Outcome:
    """What clients were told, and what came of it."""

    answers: dict[str, bytes] = field(default_factory=dict)  # by id, as the client saw them
    reports: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Clients:
    """So many clients, each with one request at a time, until they are told to stop."""

    def __init__(self, gateways: Sequence[Gateway], outcome: Outcome) -> None:
        self._gateways, self._outcome = gateways, outcome
        self._http = httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None))
        self._turn = itertools.count()
        self.stop = False

    async def run(self, clients: int) -> None:
        async with self._http, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        for turn in itertools.count():
            if self.stop:
                return
            name = f"answer-{number}-{turn}"
            body = {
                "model": "any",
                "messages": [{"role": "user", "content": f"{number} {turn}"}],
                "stream": turn % 2 == 1,
            }
            answer = await self._until_served("/v1/chat/completions", body, name)
            self._outcome.answers[name] = answer.content
            if turn % 10 == 0:
                again = await self._until_served("/v1/chat/completions", body, name)
                self._outcome.counts["asked once more"] += 1
                if again.content != answer.content or again.headers[RECEIPT] != name:
                    self._outcome.problems.append(f"{name} was answered differently when it was asked for once more")
            verdict = {"references": [name], "score": float(turn % 2)}
            await self._until_served("/reef/report", verdict, f"report-{number}-{turn}")
            self._outcome.reports.add(f"report-{number}-{turn}")

    async def _until_served(self, path: str, body: dict, record_id: str) -> httpx.Response:
        """Ask one gateway after the other, with the same id."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            gateway = self._gateways[next(self._turn) % len(self._gateways)]
            if gateway.up:
                try:
                    response = await self._http.post(
                        gateway.server.url + path, json=body, headers={"x-reef-record-id": record_id}
                    )
                    if response.status_code == 200:
                        return response
                    self._outcome.counts[f"status {response.status_code}"] += 1
                    if response.status_code < 500:
                        raise AssertionError(f"{record_id}: {response.status_code} {response.text}")
                except httpx.TransportError:
                    self._outcome.counts["connections lost"] += 1
            assert time.monotonic() < deadline, f"{record_id} was not served within {GIVE_UP_SECONDS:.0f} s"
            await asyncio.sleep(0.05)


async def put_under_load(gateways: Sequence[Gateway], clients: int, seconds: float, kill_every: float) -> Outcome:
    """Returns what clients were told, with the killed gateway serving again."""
    outcome = Outcome()
    load = Clients(gateways, outcome)
    running = asyncio.create_task(load.run(clients))
    ends_at = time.monotonic() + seconds
    try:
        while time.monotonic() + kill_every < ends_at and not running.done():
            await asyncio.sleep(kill_every)
            gateways[0].kill()
            outcome.counts["kills"] += 1
            await asyncio.to_thread(gateways[0].start)
        await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
    finally:
        load.stop = True
        await running
    return outcome


async def examine(url: str, outcome: Outcome) -> None:
    """Compare what clients were told with what the database holds."""
    storage = storage_at(url)
    await storage.open()
    held: Counter[str] = Counter()
    try:
        after = 0
        while page := await storage.page("default", after=after, limit=500):
            after = page[-1].sequence
            for record in page:
                held[record.record_id] += 1
                if isinstance(record, InferenceRecord) and record.record_id in outcome.answers:
                    if record.response != outcome.answers[record.record_id]:
                        outcome.problems.append(f"{record.record_id} is not stored as its client saw it")
                elif isinstance(record, ReportRecord):
                    outcome.counts["reports stored"] += 1
    finally:
        await storage.close()
    told = [*outcome.answers, *outcome.reports]
    lost = [name for name in told if not held[name]]
    twice = [name for name, number in held.items() if number > 1]
    outcome.counts.update({"answers acknowledged": len(outcome.answers), "reports acknowledged": len(outcome.reports)})
    outcome.counts.update({"acknowledged and lost": len(lost), "stored twice": len(twice)})
    outcome.problems += [f"{name} was acknowledged and is lost" for name in lost]
    outcome.problems += [f"{name} is stored twice" for name in twice]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_server(fsync=True) as postgres, provider() as upstream:
        flags = {
            "inference.upstream-url": upstream,
            "storage.backend": "postgres",
            "storage.url": postgres.url,
            "storage.schema": "load",
        }
        gateways = [Gateway(number, Path(name), flags) for number in range(options.gateways)]
        try:
            for gateway in gateways:
                gateway.start()
            began = time.monotonic()
            loaded = put_under_load(gateways, options.clients, options.seconds, options.kill_every)
            outcome = asyncio.run(loaded)
            took = time.monotonic() - began
        finally:
            for gateway in gateways:
                gateway.stop()
        asyncio.run(examine(f"{postgres.url}&schema=load", outcome))
    print(f"{options.gateways} gateways, {options.clients} clients, {took:.0f} s:")
    for what, number in sorted(outcome.counts.items()):
        print(f"  {number:>8,} {what}")
    for problem in outcome.problems[:20]:
        print(f"  PROBLEM: {problem}")
    if options.json is not None:
        document = {**vars(options), "json": None, "took": took, "counts": outcome.counts, "problems": outcome.problems}
        options.json.write_text(json.dumps(document, indent=2))
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
