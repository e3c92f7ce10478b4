"""The commands against a real HTTP server on a socket, which records what it was asked and gives canned answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from reef.cli import main, root
from reef.config import known_keys

RELEASE = {
    "release_id": "rel_2",
    "number": 2,
    "kind": "rollback",
    "content_id": "abc",
    "runtime_load_id": "engine:2",
    "created_at": 0.0,
}


class FakeReef:
    """Answers by (method, path without query); everything else is a 404 in OpenAI's shape."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {("GET", "/reef/status"): {"default_scenario": "main"}}
        self.calls: list[tuple[str, str, Any, dict[str, str]]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                fake.calls.append((self.command, self.path, json.loads(body) if body else None, headers))
                missing = {"error": {"message": f"no such route: {self.path}", "type": "not_found"}}
                answer = fake.answers.get((self.command, self.path.split("?")[0]), (404, missing))
                answer = answer(self.path) if callable(answer) else answer
                status, document = answer if isinstance(answer, tuple) else (200, answer)
                sent = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeReef]:
    fake = FakeReef()
    monkeypatch.setenv("REEF_URL", fake.url)
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run one command line in an empty directory; return exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


# ---------------------------------------------------------------------------------------------- serve, help, errors


def test_serve_help_lists_every_key_with_what_it_expects(run: Run) -> None:
    code, out, _ = run("serve", "--help")
    words = " ".join(out.split())
    assert code == 0
    assert [key.dotted for key in known_keys().values() if f"--{key.dotted} " not in words] == []
    assert "[int >= 0 and <= 65535; default: 8900]" in words
    assert "REEF_RECIPE__BATCH_SIZE" in words


def commands(found: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command by its words, those of groups too; each must explain all of its options."""
    if not isinstance(found, click.Group):
        assert [param.name for param in found.params if isinstance(param, click.Option) and not param.help] == []
        yield path
        return
    context = click.Context(found)
    for name in found.list_commands(context):
        yield from commands(found.get_command(context, name), *path, name)


@pytest.mark.parametrize("command", [(), *commands(root)], ids="-".join)
def test_help_teaches_with_an_example(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"  reef {' '.join(command) or 'serve'}" in out.split("Options:")[0].split("\n", 1)[1]


def test_a_shell_completes_commands_and_keys(run: Run, tmp_path: Path) -> None:
    code, script, _ = run("completion", "bash")
    assert code == 0 and "_REEF_COMPLETE=bash_complete" in script
    (tmp_path / "reef").write_text(f'#!/bin/sh\nexec {sys.executable} -m reef.cli "$@"\n')
    (tmp_path / "reef").chmod(0o755)
    asking = "COMP_WORDS=(reef serve --inference.model-p); COMP_CWORD=2; _reef_completion reef; echo ${COMPREPLY[*]}"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    shell = ["bash", "--norc", "-c", f"{script}\n{asking}"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stdout.split() == ["--inference.model-path"], done.stderr


@pytest.mark.parametrize(("shell", "starts"), [("/bin/zsh", "#compdef reef"), ("/usr/bin/fish", "function _reef")])
def test_completion_is_for_the_shell_that_is_used(run: Run, monkeypatch, shell: str, starts: str) -> None:
    monkeypatch.setenv("SHELL", shell)
    assert run("completion")[1].startswith(starts)
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run("completion")[0] == 2


def test_print_config_shows_flags_and_the_local_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reef.yaml").write_text("reef:\n  port: 1234\n")
    code, out, _ = run("serve", "--inference.model-path", "m", "--recipe.normalize", "--print-config")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["port:", "1234", "#", "file", "reef.yaml:2"] in lines
    assert ["normalize:", "true", "#", "flag", "--recipe.normalize"] in lines


def test_print_config_reads_the_environment_and_hides_tokens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEF_REEF__TOKENS", "hunter2")
    monkeypatch.setenv("REEF_INFERENCE__MODEL_PATH", "m")
    code, out, _ = run("serve", "--print-config")
    assert code == 0 and "hunter2" not in out and "env REEF_INFERENCE__MODEL_PATH" in out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["serve"], ["inference.model-path is required"]),
        (["serve", "--config", "none.yaml"], ["none.yaml"]),
        (["serve", "--recipe.batchsize", "3"], ["--recipe.batchsize", "nearest known one is --recipe.batch-size"]),
        (
            ["serve", "--inference.model-path", "m", "--recipe.batch-size", "0"],
            ["recipe.batch-size must be int >= 1, got '0'"],
        ),
        (["serve", "--inference.model-path", "m", "--reef.host", "0.0.0.0"], ["reef.host", "reef.tokens"]),
        (["serve", "extra"], ["extra"]),
        (["stat"], ["stat", "status"]),
        (["status", "--jsn"], ["--jsn", "--json"]),
        (["report"], ["RECEIPTS"]),
        (["report", "r", "--score", "good"], ["--score", "good"]),
        (["report", "r", "--metadata", "[1]"], ["--metadata must be a JSON object"]),
        (["report", "r", "--feedback", "{x"], ["--feedback must be a JSON object"]),
        (["promote"], ["RELEASE_ID", "--job"]),
        (["promote", "a", "--job", "b"], ["RELEASE_ID", "--job"]),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(run: Run, arguments: list[str], parts: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("reef: ") and err.count("\n") == 1
    assert [part for part in parts if part not in err] == []


def test_importing_the_command_line_stays_light() -> None:
    heavy = "torch transformers peft starlette uvicorn openai rich numpy matplotlib"
    code = f"import sys, reef.cli; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- a running Reef


def test_report_sends_what_was_given_and_nothing_else(run: Run, fake: FakeReef) -> None:
    fake.answers["POST", "/reef/report"] = {"agent_record_id": "rep_1"}
    code, out, _ = run("report", "a", "b", "--score", "0", "--metadata", '{"group": "g"}', "--scenario", "s")
    assert (code, out) == (0, "stored as rep_1\n")
    _, _, body, headers = fake.calls[-1]
    assert body == {"references": ["a", "b"], "score": 0.0, "metadata": {"group": "g"}}
    assert headers["x-reef-scenario"] == "s"


def test_report_feedback_error_and_id(run: Run, fake: FakeReef) -> None:
    fake.answers["POST", "/reef/report"] = {"agent_record_id": "mine"}
    run("report", "a", "--feedback", '{"why": "long"}', "--error", "timeout", "--id", "mine")
    assert fake.calls[-1][2] == {
        "references": ["a"],
        "error": "timeout",
        "feedback": {"why": "long"},
        "agent_record_id": "mine",
    }
    assert "x-reef-scenario" not in fake.calls[-1][3]
    run("report", "a", "--feedback", "too long")
    assert fake.calls[-1][2]["feedback"] == "too long"


def test_the_token_is_sent_as_bearer(run: Run, fake: FakeReef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEF_TOKEN", "secret")
    run("status", "--json")
    assert fake.calls[-1][3]["authorization"] == "Bearer secret"


def test_status_is_a_few_lines_for_people_or_json(run: Run, fake: FakeReef) -> None:
    counts = {"inference": 5, "report": 3, "consumed.trained": 2, "consumed.stale": 0}
    scenario = {
        "scenario": "support",
        "head": {"number": 1, "kind": "trained", "runtime_load_id": "engine:1"},
        "counts": counts,
        "waiting": {"pending": 1, "ready": 0},
        "recipe": "scored",
        "prefixes": {"prompt_tokens": 400, "hit_tokens": 300, "hit_bytes": 9600, "recomputed_tokens": 12},
        "last_outcome": "no signal",
        "error": None,
    }
    engine = {"engine": "engine-0", "running": 1, "waiting": 0, "free_pages": 7, "total_pages": 8}
    answer = {"model": "m", "uptime_seconds": 61.4, "health": [], "engines": [engine], "scenarios": [scenario]}
    answer |= {"trains": "another process (host:x)", "last_pause_seconds": 0.0214}
    answer["job"] = {"job_id": "job_1", "scenario": "support", "state": "updating_weights"}
    fake.answers["GET", "/reef/status"] = answer
    assert json.loads(run("status", "--json")[1]) == answer
    assert run("status")[1].splitlines() == [
        "m, up 61 s, healthy",
        "trains: another process (host:x)",
        "job job_1 of support: updating_weights",
        "last pause: 21 ms",
        "engine-0: 1 running, 0 waiting, 7 of 8 pages free",
        "support: serves release 1 (trained, engine:1); 5 answers, 3 reports, recipe scored",
        "  waits: 1 pending",
        "  consumed: 2 trained",
        "  prefixes: 75% of 400 prompt tokens cached, 12 tokens computed again",
        "  last: no signal",
    ]


def test_releases_of_the_default_scenario(run: Run, fake: FakeReef) -> None:
    fake.answers["GET", "/reef/scenarios/main/releases"] = {"releases": [RELEASE], "head": "rel_2"}
    code, out, _ = run("releases", "--limit", "5")
    assert code == 0
    assert out == "2\trel_2\trollback\tabc\tengine:2\t1970-01-01 00:00:00\t-\n"
    assert fake.calls[-1][1] == "/reef/scenarios/main/releases?limit=5"


def test_rollback_to_the_parent_and_to_a_release(run: Run, fake: FakeReef) -> None:
    fake.answers["POST", "/reef/scenarios/main/rollback"] = RELEASE
    fake.answers["POST", "/reef/scenarios/s/rollback"] = RELEASE
    code, out, _ = run("rollback")
    assert (code, out) == (0, "release 2 (rel_2) now serves abc\n")
    assert fake.calls[-1][2] == {}
    assert json.loads(run("rollback", "rel_1", "--scenario", "s", "--json")[1]) == RELEASE
    assert fake.calls[-1][2] == {"release_id": "rel_1"}


def test_promote_a_release_or_a_job(run: Run, fake: FakeReef) -> None:
    fake.answers["POST", "/reef/scenarios/main/promote"] = RELEASE
    run("promote", "rel_1")
    assert fake.calls[-1][2] == {"release_id": "rel_1"}
    run("promote", "--job", "job_1")
    assert fake.calls[-1][2] == {"job_id": "job_1"}


def test_records_follows_the_pages(run: Run, fake: FakeReef, tmp_path: Path) -> None:
    pages = {"0": {"records": [{"n": 1}, {"n": 2}], "next_after": 7}, "7": {"records": [{"n": 3}], "next_after": None}}

    def page(path: str) -> Any:
        return pages[path.split("after=")[1].split("&")[0]]

    fake.answers["GET", "/reef/scenarios/main/records"] = page
    code, out, _ = run("records", "--kind", "report")
    assert (code, out) == (0, '{"n":1}\n{"n":2}\n{"n":3}\n')
    assert "kind=report" in fake.calls[-1][1] and "since" not in fake.calls[-1][1]
    assert run("records", "--output", "out.jsonl")[1] == ""
    assert (tmp_path / "out.jsonl").read_text() == out


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ((404, {"error": {"message": "there is no scenario 'x'"}}), "reef: there is no scenario 'x'"),
        ((409, {"error": {"message": "head moved"}}), "reef: head moved"),
        ((401, {"error": {"message": "no token"}}), "REEF_TOKEN"),
        ((500, b"<html>"), "answered 500"),
        ((200, b"<html>"), "without JSON"),
    ],
)
def test_an_error_from_the_server_is_shown_in_its_own_words(run: Run, fake: FakeReef, answer: Any, part: str) -> None:
    fake.answers["GET", "/reef/scenarios/x/releases"] = answer
    code, out, err = run("releases", "--scenario", "x")
    assert (code, out) == (1, "")
    assert part in err and err.count("\n") == 1


def test_a_scenario_name_is_quoted(run: Run, fake: FakeReef) -> None:
    run("releases", "--scenario", "a/../b?c")
    assert fake.calls[-1][1].startswith("/reef/scenarios/a%2F..%2Fb%3Fc/releases?")


def test_nobody_listens(run: Run) -> None:
    code, _, err = run("status", "--url", "http://127.0.0.1:1")
    assert code == 1 and "no Reef answers at http://127.0.0.1:1" in err and err.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_a_wrong_url(run: Run, url: str) -> None:
    code, _, err = run("status", "--url", url)
    assert code == 1 and "URL" in err and err.count("\n") == 1
