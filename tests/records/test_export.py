from __future__ import annotations

import json
from dataclasses import replace

from reef.records.export import export_jsonl
from reef.runtime.interfaces import InstructionRecord, RecordKind
from tests.records.values import exchange, report


def test_export_pages_through_everything(storage, run):
    for number in range(7):
        run(storage.append(exchange(f"e{number}")))
        run(storage.append(report(f"r{number}", [f"e{number}"])))
    run(storage.append(InstructionRecord(record_id="i", scenario="s", created_at=1.0, body={"goal": "x\ny"})))
    lines: list[str] = []
    assert run(export_jsonl(storage, "s", lines.append, page_size=4)) == 15
    records = [json.loads(line) for line in lines]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert [record["sequence"] for record in records] == list(range(1, 16))
    assert records[0]["generations"][0]["spans"][1] == {"start": 2, "end": 3, "runtime_load_id": "engine:2"}
    assert records[1]["references"] == ["e0"]
    assert records[14] == {
        "kind": "instruction",
        "record_id": "i",
        "scenario": "s",
        "created_at": 1.0,
        "body": {"goal": "x\ny"},
        "sequence": 15,
    }


def test_export_filters(storage, run):
    for number in range(4):
        run(storage.append(exchange(f"e{number}", created_at=float(number))))
        run(storage.append(report(f"r{number}")))
    lines: list[str] = []
    assert run(export_jsonl(storage, "s", lines.append, kind=RecordKind.INFERENCE, since=1.0, until=3.0)) == 2
    assert [json.loads(line)["record_id"] for line in lines] == ["e1", "e2"]
    assert run(export_jsonl(storage, "unknown", lines.append)) == 0


def test_bodies_are_readable(storage, run):
    bodies = {
        "json": (b'{"model":\n "m"}', {"model": "m"}),
        "text": (b"data: {}\n\n", "data: {}\n\n"),
        "nan": (b'{"x": NaN}', '{"x": NaN}'),
        "binary": (b"\xff\x00", {"base64": "/wA="}),
    }
    for name, (body, _) in bodies.items():
        run(storage.append(replace(exchange(name), request=body)))
    lines: list[str] = []
    run(export_jsonl(storage, "s", lines.append))
    assert [json.loads(line)["request"] for line in lines] == [readable for _, readable in bodies.values()]


def test_every_line_is_strict_json(storage, run):
    record = exchange("a")
    record.generations[0].logprobs = [float("-inf"), float("nan"), -1.0]
    run(storage.append(record))
    lines: list[str] = []
    run(export_jsonl(storage, "s", lines.append))

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(lines[0], parse_constant=refuse)["generations"][0]["logprobs"] == [None, None, -1.0]
