"""Tokens a second of 16 streams through `reef serve`, against the same engine alone in a process of its own.

    python -m benchmarks.serving [--streams 16] [--tokens 128] [--rounds 5] [--threads 2] [--json FILE]

Both serve SmolLM2-135M with the same threads, in bfloat16 where the CPU computes in it and float32 elsewhere, in turns,
and share no prefixes; whoever does not serve sleeps. The way through the gateway includes HTTP, the template,
server-sent events, the record, and this program's own reading of the streams, all on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import uvloop

from benchmarks.gateway import Client, process

WORDS = ["reef", "coral", "tide", "kelp", "wave", "shell", "sand", "fish", "current", "lagoon", "anchor", "harbor"]


class Stream(Client):
    """Notes the usage that the stream ends with."""

    def on_body(self, data: bytes) -> None:
        self.text = getattr(self, "text", b"") + data

    def usage(self) -> dict[str, int]:
        events = [json.loads(line[6:]) for line in self.text.split(b"\n") if line.startswith(b"data: {")]
        return next(event["usage"] for event in reversed(events) if event.get("usage"))


async def ask(port: int, contents: list[str], tokens: int) -> tuple[float, list[dict[str, int]]]:
    """Seconds until the last of the streams ended, and what each of them says that it used."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in contents]
    requests = []
    for content in contents:
        body = json.dumps({
            "model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    began = time.perf_counter()
    await asyncio.gather(*(client.ask(request) for client, request in zip(clients, requests, strict=True)))
    seconds = time.perf_counter() - began
    for client in clients:
        client.transport.close()
    return seconds, [client.usage() for client in clients]


def contents(seed: int, streams: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=24)) for _ in range(streams)]


def run_engine(model: str, threads: int) -> None:
    """The engine's process: a line of JSON (prompt lengths, tokens) in, seconds out."""
    from benchmarks._engines import DTYPE
    from benchmarks.engine import generate
    from reef.inference.local.config import LocalConfig
    from reef.inference.local.engine import LocalEngine

    engine = LocalEngine(LocalConfig(model_path=model, dtype=DTYPE, threads=threads, prefix_cache=False))
    print("ready", flush=True)
    for line in sys.stdin:
        lengths, tokens = json.loads(line)
        draw = random.Random(line)
        prompts = [[draw.randrange(10, 40_000) for _ in range(length)] for length in lengths]
        engine.flush()
        began = time.perf_counter()
        generate(engine, prompts, tokens)
        print(time.perf_counter() - began, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, help="write the results here, too")
    options = parser.parse_args()
    from benchmarks._engines import DTYPE
    from reef.demo.model import smollm2_directory

    model = str(smollm2_directory())
    through, alone = [], []
    served = ["-m", "reef.cli", "serve", "--reef.port", "0", "--inference.model-path", model]
    served += ["--inference.threads", str(options.threads), "--inference.dtype", DTYPE]
    served += ["--inference.prefix-cache", "false", "--reef.data-dir"]
    own = ["-m", "benchmarks.serving", "engine", model, str(options.threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as data, process(*own, **pipes) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdout.readline()
        with process(*served, data, stderr=subprocess.PIPE) as reef:
            while " ready at " not in (line := reef.stderr.readline()):
                assert line, "reef serve ended"
            port = int(line.split(",")[0].rpartition(":")[2])
            for number in range(options.rounds + 1):  # the first warms up
                seconds, usages = uvloop.run(ask(port, contents(number, options.streams), options.tokens))
                produced = sum(usage["completion_tokens"] for usage in usages)
                assert produced == options.streams * options.tokens, usages
                engine.stdin.write(json.dumps([[usage["prompt_tokens"] for usage in usages], options.tokens]) + "\n")
                engine.stdin.flush()
                through.append(produced / seconds)
                alone.append(produced / float(engine.stdout.readline()))
    ratios = sorted(mine / its for mine, its in zip(through[1:], alone[1:], strict=True))
    print(f"{options.streams} streams of {options.tokens} tokens, {options.threads} threads, median (range), "
          f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    for name, values in (("through reef serve, tokens/s", through[1:]), ("engine alone, tokens/s", alone[1:])):
        print(f"  {name:30} {statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})")
    print(f"  {'ratio':30} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    if options.json is not None:
        options.json.write_text(json.dumps({"through": through[1:], "alone": alone[1:], "ratios": ratios}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        run_engine(sys.argv[2], int(sys.argv[3]))
    else:
        main()
