"""What Reef costs in front of a provider: the same requests straight to a dummy upstream and through Reef, in turns.

The upstream and the load generator are processes of their own, so that on two cores all three share them. A request
counts when its answer is complete; through Reef that is when its record is durable (SQLite, `synchronous=FULL`).
Processor time is of the whole process and, unlike the clock, says something on a busy machine, too.

    python -m benchmarks.gateway --seconds 5 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httptools
import uvloop

PATH = "/v1/chat/completions"
BODY = {
    "model": "dummy",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is a reef made of? Answer in one short sentence, please."},
    ],
    "temperature": 0.7,
}
ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "dummy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Of the skeletons of corals, mostly."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39},
}
PIECES = 8  # of a streamed answer


# ---------------------------------------------------------------------------------------------- upstream


def head(kind: str, rest: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{rest}\r\n\r\n".encode()


def whole() -> list[bytes]:
    body = json.dumps(ANSWER).encode()
    return [head("application/json", f"content-length: {len(body)}") + body]


def stream() -> list[bytes]:
    parts = [head("text/event-stream", "transfer-encoding: chunked")]
    for number in range(PIECES + 1):
        last = number == PIECES
        choice = {
            "index": 0,
            "delta": {} if last else {"content": f"word{number} "},
            "finish_reason": "stop" if last else None,
        }
        parts.append(chunk({"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [choice]}))
    data = b"data: [DONE]\n\n"
    parts.append(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    return parts


def chunk(content: dict) -> bytes:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """Answers every request; a streamed answer goes out an event in each turn of the loop."""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        parts = stream() if b'"stream": true' in self.body else whole()
        self.body = b""
        self.write(parts, 0)

    def write(self, parts: list[bytes], index: int) -> None:
        self.transport.write(parts[index])
        if index + 1 < len(parts):
            asyncio.get_running_loop().call_soon(self.write, parts, index + 1)


async def serve_upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---------------------------------------------------------------------------------------------- load


class Client(asyncio.Protocol):
    """One kept connection; `ask` resolves when the answer is complete."""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError("the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-reef-agent-record-id":
            self.receipt = value

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() not in (200, 201):
            self.answer.set_exception(RuntimeError(f"status {self.parser.get_status_code()}"))
        else:
            self.answer.set_result(self.receipt)

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        self.receipt = b""
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answer


def request(path: str, body: dict, scenario: str = "bench") -> bytes:
    content = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nx-reef-scenario: {scenario}\r\n"
    return f"{lines}content-length: {len(content)}\r\n\r\n".encode() + content


async def load(port: int, make: Callable[[int], bytes], concurrency: int, seconds: float, limit: int) -> dict:
    """Ask until time or requests run out, `concurrency` at once."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    receipts: list[str] = []
    asked = 0
    began = time.perf_counter()

    async def one() -> None:
        nonlocal asked
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        while asked < limit and time.perf_counter() - began < seconds:
            asked += 1
            started = time.perf_counter()
            receipts.append((await client.ask(make(asked - 1))).decode())
            times.append(time.perf_counter() - started)
        client.answer = loop.create_future()
        client.answer.cancel()
        client.transport.close()

    await asyncio.gather(*(one() for _ in range(concurrency)))
    times.sort()
    return {
        "per_second": len(times) / (time.perf_counter() - began),
        "p50_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[int(len(times) * 0.99)],
        "requests": len(times),
        "receipts": receipts,
    }


def run_load(arguments: list[str]) -> None:
    """The load generator's process: parameters in, JSON out."""
    port, kind, concurrency, seconds, limit = (int(arguments[0]), arguments[1], *map(float, arguments[2:5]))
    if kind == "report":
        receipts = json.load(sys.stdin)
        requests = [request("/reef/report", {"references": [receipt], "score": 1.0}) for receipt in receipts]
    elif kind == "scenario":
        requests = [request("/reef/scenarios", {"name": f"new-{os.getpid()}-{n}"}) for n in range(int(limit))]
    else:
        requests = [request(PATH, {**BODY, "stream": True} if kind == "stream" else BODY)]
    made = load(port, lambda n: requests[n % len(requests)], int(concurrency), seconds, int(limit))
    json.dump(uvloop.run(made), sys.stdout)


# ---------------------------------------------------------------------------------------------- measuring


@contextmanager
def process(*command: str, **options) -> Iterator[subprocess.Popen]:
    found = subprocess.Popen([sys.executable, *command], text=True, **options)
    try:
        yield found
    finally:
        found.terminate()
        found.wait(30)


@contextmanager
def reef(upstream: int, data: Path) -> Iterator[tuple[int, int, float]]:
    """Port, process id, and the seconds from its start to its first line."""
    flags = {"inference.upstream-url": f"http://127.0.0.1:{upstream}", "reef.port": "0", "reef.data-dir": str(data)}
    named = [part for name, text in flags.items() for part in (f"--{name}", text)]
    began = time.perf_counter()
    with process("-m", "reef.cli", "serve", *named, stderr=subprocess.PIPE) as served:
        line = served.stderr.readline()
        ready = time.perf_counter() - began
        port = int(line.split(",")[0].rpartition(":")[2])
        yield port, served.pid, ready


def cpu_seconds(pid: int) -> float:
    """Processor time that the process has taken, where the system says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, pid: int, kind: str, concurrency: int, seconds: float, limit: int = 10**9, stdin="") -> dict:
    command = [sys.executable, "-m", "benchmarks.gateway", "load", str(port), kind, str(concurrency), str(seconds)]
    before = cpu_seconds(pid)
    done = subprocess.run([*command, str(limit)], input=stdin, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    found["cpu_ms"] = 1e3 * (cpu_seconds(pid) - before) / found["requests"]
    return found


CASES = {
    "chat, 1 at a time": ("chat", 1),
    "chat, 16": ("chat", 16),
    "chat, 64": ("chat", 64),
    "stream, 16": ("stream", 16),
}


def compare(upstream: tuple[int, int], gateway: tuple[int, int], seconds: float, rounds: int) -> dict:
    """Each case straight and through Reef, in turns; medians over the rounds."""
    samples: dict[str, dict[str, list[dict]]] = {case: {"direct": [], "reef": []} for case in CASES}
    for where in (upstream, gateway):
        measure(*where, "chat", 16, 1.0)  # warm up
    for _ in range(rounds):
        for case, (kind, concurrency) in CASES.items():
            for name, where in (("direct", upstream), ("reef", gateway)):
                found = measure(*where, kind, concurrency, seconds)
                del found["receipts"]
                samples[case][name].append(found)
    return {
        case: {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in sides.items()
        }
        for case, sides in samples.items()
    }


def reports(gateway: tuple[int, int], number: int) -> dict:
    receipts = measure(*gateway, "chat", 64, 600.0, number)["receipts"]
    found = measure(*gateway, "report", 64, 600.0, len(receipts), json.dumps(receipts))
    del found["receipts"]
    return found


def scenarios(gateway: tuple[int, int], number: int) -> dict:
    found = measure(*gateway, "scenario", 1, 600.0, number)
    del found["receipts"]
    return found


def soak(gateway: tuple[int, int], number: int) -> dict:
    """Resident memory of the gateway, every two seconds, while it answers so many requests."""
    samples: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(measure, *gateway, "chat", 64, 3600.0, number)
        while not running.done():
            samples.append(resident(gateway[1]))
            time.sleep(2)
    found = running.result()
    return {"requests": found["requests"], "per_second": found["per_second"], "mib": samples}


def resident(pid: int) -> float:
    """MiB; Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"process {pid} has no VmRSS")


def disk(directory: Path, number: int = 500) -> dict:
    """What 16 KiB take to be durable where the database lies: each durable answer waits for that much at least."""
    times = []
    with (directory / "probe").open("wb", buffering=0) as file:
        for turn in range(2 * number):  # the first half makes the file
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(16384), turn % number * 16384)
            os.fsync(file.fileno())
            times.append(1e3 * (time.perf_counter() - began))
    times = sorted(times[number:])
    return {"p50_ms": times[number // 2], "p99_ms": times[int(number * 0.99)]}


def fill(data: Path, number: int) -> None:
    """Put so many records into the stopped deployment's database, as copies of those it has."""
    import sqlite3

    connection = sqlite3.connect(data / "reef.db")
    (last,) = connection.execute("SELECT max(seq) FROM records").fetchone()
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        "INSERT INTO records (record_id, scenario, kind, created_at, digest, payload) "
        "SELECT printf('copy-%d', i), scenario, kind, created_at, digest, payload FROM n "
        "JOIN records r ON r.seq = 1 + i % ?",
        (number, last),
    )
    connection.commit()
    connection.close()


def show(results: dict) -> None:
    print(f"load average {results['load_average']:.1f}, {os.cpu_count()} CPUs, medians of {results['rounds']} rounds")
    print(
        "| | direct/s | Reef/s | ratio | added p50, ms | added p99, ms | Reef's processor time, ms | the dummy's, ms |"
    )
    print("| --- |" + " ---: |" * 7)
    for case, sides in results["cases"].items():
        direct, through = sides["direct"], sides["reef"]
        print(
            f"| {case} | {direct['per_second']:,.0f} | {through['per_second']:,.0f} "
            f"| {through['per_second'] / direct['per_second']:.2f} | {through['p50_ms'] - direct['p50_ms']:.2f} "
            f"| {through['p99_ms'] - direct['p99_ms']:.2f} | {through['cpu_ms']:.3f} | {direct['cpu_ms']:.3f} |"
        )
    print(f"16 KiB and an fsync alone: p50 {results['disk']['p50_ms']:.2f} ms, p99 {results['disk']['p99_ms']:.2f} ms")
    report, scenario = results["reports"], results["scenarios"]
    print(
        f"reports, 64 at a time: {report['per_second']:,.0f} a second, {report['cpu_ms']:.3f} ms of processor time each"
    )
    print(f"creating a scenario: p50 {scenario['p50_ms']:.1f} ms, p99 {scenario['p99_ms']:.1f} ms")
    if (soaked := results["soak"])["requests"]:
        mib = soaked["mib"]
        places = {"begin": 0, "quarter": len(mib) // 4, "half": len(mib) // 2, "end": len(mib) - 1}
        shown = ", ".join(f"{mib[place]:.0f} MiB at its {name}" for name, place in places.items())
        print(f"{soaked['requests']:,} requests, {soaked['per_second']:,.0f} a second: {shown}")
    for number, ready in results["ready_seconds"].items():
        print(f"ready with {int(number):,} records: {ready:.2f} s after its start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reports", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=1_000_000, help="in the database of the last start")
    parser.add_argument("--soak", type=int, default=200_000, help="requests over which memory is watched")
    parser.add_argument("--directory", type=Path, default=None, help="on the file system to measure")
    parser.add_argument("--json", type=Path, default=None, help="write the results here, too")
    arguments = parser.parse_args()
    data = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        with process("-m", "benchmarks.gateway", "upstream", stdout=subprocess.PIPE) as upstream:
            port = int(upstream.stdout.readline())
            with reef(port, data) as (reef_port, pid, ready):
                gateway = (reef_port, pid)
                results = {
                    "disk": disk(data),
                    "cases": compare((port, upstream.pid), gateway, arguments.seconds, arguments.rounds),
                    "reports": reports(gateway, arguments.reports),
                    "scenarios": scenarios(gateway, 200),
                    "soak": soak(gateway, arguments.soak),
                    "rounds": arguments.rounds,
                    "load_average": os.getloadavg()[1],
                    "ready_seconds": {"0": ready},
                }
            fill(data, arguments.records)
            with reef(port, data) as (_, _, ready):
                results["ready_seconds"][str(arguments.records)] = ready
    finally:
        shutil.rmtree(data)
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["upstream"]:
        uvloop.run(serve_upstream())
    elif sys.argv[1:2] == ["load"]:
        run_load(sys.argv[2:])
    else:
        main()
