"""Clients that talk to the deployment all the while, try again as careful clients do, and remember what they got."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

RECEIPT_HEADER = "x-reef-agent-record-id"
RETRY_SECONDS = 0.2
QUESTIONS = ("What grows on a reef?", "Why?", "Tell me about the tide.", "And the fish, what do they eat at night?")
NO_SPECIAL_TOKENS = {"256": -100, "257": -100}


@dataclass(slots=True, kw_only=True)
class Answer:
    """An acknowledged one: its receipt was received."""

    receipt: str
    scenario: str
    received: bytes  # a prefix of the recorded response, or all of it
    whole: bool
    finished_at: float


@dataclass(slots=True, kw_only=True)
class Fragment:
    """What a client saw of a stream that ended without a receipt: tokens with their log-probabilities."""

    scenario: str
    question: str
    tokens: list[tuple[int, float]]
    started_at: float
    finished_at: float


@dataclass(slots=True, kw_only=True)
class Report:
    """An acknowledged one."""

    record_id: str
    scenario: str
    receipt: str
    score: float


@dataclass(slots=True)
class Ledger:
    """What the clients hold the deployment to. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, Answer] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    instructions: dict[str, str] = field(default_factory=dict)  # id -> scenario
    fragments: list[Fragment] = field(default_factory=list)
    refused: int = 0  # answers 503
    lost: list[str] = field(default_factory=list)  # acknowledged, then denied
    surprises: list[str] = field(default_factory=list)  # answers that nobody should get

    def receipts(self, scenario: str) -> set[str]:
        with self.lock:
            answers = {receipt for receipt, answer in self.answers.items() if answer.scenario == scenario}
            reports = {record_id for record_id, report in self.reports.items() if report.scenario == scenario}
            return answers | reports | {one for one, where in self.instructions.items() if where == scenario}


class Load:
    """`talkers` threads, each with one request at a time; every other one streams."""

    def __init__(self, port: int, scenarios: list[str], seed: int, talkers: int = 3) -> None:
        self.ledger = Ledger()
        self.reporting = threading.Event()
        self.reporting.set()
        self._port = port
        self._scenarios = scenarios
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"), number), daemon=True)
            for number in range(talkers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)

    # ------------------------------------------------------------------ one client

    def _run(self, luck: random.Random, number: int) -> None:
        while not self._stop.is_set():
            try:
                receipt, scenario = self._converse(luck, streams=number % 2 == 0)
                if receipt is not None and self.reporting.is_set() and luck.random() < 0.9:
                    self._report(luck, receipt, scenario)
            except Exception as error:  # a client that fell over would make the proof weaker without a sign
                self._note(f"client {number}: {type(error).__name__}: {error}")
            self._stop.wait(luck.uniform(0.02, 0.2))

    def _converse(self, luck: random.Random, *, streams: bool) -> tuple[str | None, str]:
        scenario, question = luck.choice(self._scenarios), luck.choice(QUESTIONS)
        body: dict[str, Any] = {
            "model": "any",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": luck.choice((4, 12, 40)),
            "seed": luck.randrange(10**6),
        }
        own_id = f"chat-{uuid.UUID(int=luck.getrandbits(128)).hex}" if luck.random() < 0.5 else None
        headers = {"x-reef-scenario": scenario} | ({RECEIPT_HEADER: own_id} if own_id else {})
        if streams:
            body |= {
                "stream": True,
                "logprobs": True,
                "max_tokens": luck.choice((12, 40, 300)),
                "logit_bias": NO_SPECIAL_TOKENS,
            }
        content = json.dumps(body).encode()
        while not self._stop.is_set():
            receipt = (
                self._stream(content, headers, scenario, question) if streams else self._ask(content, headers, scenario)
            )
            if receipt is not None or own_id is None:
                return receipt, scenario
            self._stop.wait(RETRY_SECONDS)  # the same request with the same id is harmless
        return None, scenario

    def _ask(self, content: bytes, headers: dict[str, str], scenario: str) -> str | None:
        """The receipt of a whole answer; None: try again."""
        status, received, answered = self._post("/v1/chat/completions", content, headers)
        receipt = answered.get(RECEIPT_HEADER)
        if receipt is not None:
            self._acknowledge(receipt, scenario, received, whole=True)
        if status == 200:
            return receipt
        if status == 409 and b"cut short" in received:  # answered once, but not whole: this id is used up
            return ""
        self._check_refusal(status, received, answered)
        return None

    def _stream(self, content: bytes, headers: dict[str, str], scenario: str, question: str) -> str | None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
        received, whole, started_at = b"", False, time.time()
        try:
            connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read()
                if response.status == 409 and b"cut short" in text:
                    return ""
                self._check_refusal(response.status, text, dict(response.getheaders()))
                return None
            while part := response.read1():
                received += part
            whole = True
        except (OSError, http.client.HTTPException):
            pass  # it died on us; what came so far counts
        finally:
            connection.close()
        receipt, tokens = read_stream(received)
        if receipt is not None:
            self._acknowledge(receipt, scenario, received, whole=whole)
        elif tokens:
            with self.ledger.lock:
                self.ledger.fragments.append(
                    Fragment(
                        scenario=scenario,
                        question=question,
                        tokens=tokens,
                        started_at=started_at,
                        finished_at=time.time(),
                    )
                )
        return receipt

    def _report(self, luck: random.Random, receipt: str, scenario: str) -> None:
        """Until it is acknowledged; sometimes once more after that, which must change nothing."""
        if not receipt:
            return
        report = Report(
            record_id=f"report-{uuid.UUID(int=luck.getrandbits(128)).hex}",
            scenario=scenario,
            receipt=receipt,
            score=float(luck.randrange(2)),
        )
        content = json.dumps(
            {"agent_record_id": report.record_id, "references": [receipt], "score": report.score}
        ).encode()
        again = luck.random() < 0.1
        while not self._stop.is_set():
            status, received, headers = self._post("/reef/report", content, {"x-reef-scenario": scenario})
            if status == 200:
                with self.ledger.lock:
                    self.ledger.reports[report.record_id] = report
                if not again:
                    return
                again = False
            elif status == 400 and receipt.encode() in received:
                with self.ledger.lock:
                    self.ledger.lost.append(f"{receipt}: {received.decode(errors='replace')}")
                return
            else:
                self._check_refusal(status, received, headers)
                self._stop.wait(RETRY_SECONDS)

    # ------------------------------------------------------------------ plumbing

    def _post(self, path: str, content: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        """Status (0: nobody answered), body, headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
        try:
            connection.request("POST", path, content, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, response.read(), dict(response.getheaders())
        except (OSError, http.client.HTTPException):
            return 0, b"", {}
        finally:
            connection.close()

    def _acknowledge(self, receipt: str, scenario: str, received: bytes, *, whole: bool) -> None:
        answer = Answer(receipt=receipt, scenario=scenario, received=received, whole=whole, finished_at=time.time())
        with self.ledger.lock:
            before = self.ledger.answers.setdefault(receipt, answer)
        if whole and before.whole and before.received != received:
            self._note(f"{receipt}: the same request was answered twice, differently")

    def _check_refusal(self, status: int, received: bytes, headers: dict[str, str]) -> None:
        if status == 0:
            return
        if status != 503:
            self._note(f"answered {status}: {received[:300]!r}")
        elif "retry-after" not in headers:
            self._note(f"503 without Retry-After: {received[:300]!r}")
        with self.ledger.lock:
            self.ledger.refused += 1

    def _note(self, surprise: str) -> None:
        with self.ledger.lock:
            self.ledger.surprises.append(surprise)


def read_stream(received: bytes) -> tuple[str | None, list[tuple[int, float]]]:
    """The receipt inside a stream of chat chunks, if it has come, and the tokens that were shown.

    The model's tokens are bytes, so what a client sees of a token tells which one it is.
    """
    receipt, tokens = None, []
    for event in received.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        try:
            chunk = json.loads(event[6:])
        except ValueError:
            continue  # the last one, cut in the middle
        receipt = (chunk.get("reef") or {}).get("agent_record_id", receipt)
        for choice in chunk.get("choices", []):
            for token in (choice.get("logprobs") or {}).get("content") or []:
                tokens.append((token["bytes"][0], token["logprob"]))
    return receipt, tokens
