"""The command line: `reef serve | coordinator | demo | report | status | releases | rollback | promote | ...`.

With config.py the only composition root. Importing it stays light: a command imports what it runs when it runs.
Exit codes: 0 done, 1 Reef refused or failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from reef import __version__
from reef.client import DEFAULT_URL, ReefClient
from reef.config import DEFAULT_FILE, DERIVED_DEFAULTS, Key, Resolved, inline_yaml, known_keys, nearest_key, resolve
from reef.errors import ConfigError, ReefError
from reef.verify.command import verify

Command = TypeVar("Command", bound=Callable[..., Any])

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="reef")
def root() -> None:
    """Reef keeps an agent learning while it works.

    \b
    Start here:
      reef demo                                          watch it learn, in minutes, on a small model
      reef doctor --inference.model-path DIR             is this machine ready?
      reef serve --inference.model-path DIR              serve and record
      reef serve --inference.model-path DIR --training.backend torch     ... and learn
    """


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        code = root.main(args=arguments, prog_name="reef", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error))
        code = 2
    except click.exceptions.NoSuchOption as error:
        code = _complain(f"unknown option {error.option_name}{_nearest_option(error)}", 2)
    except click.ClickException as error:
        code = _complain(error.format_message(), error.exit_code)
    except ConfigError as error:
        code = _complain(str(error), 2)
    except ReefError as error:
        code = _complain(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        code = _complain("interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    click.echo(f"reef: {message}", err=True)
    return code


def _nearest_option(error: click.exceptions.NoSuchOption) -> str:
    if "." in error.option_name:
        return f"; the nearest known one is --{nearest_key(error.option_name.lstrip('-'))}"
    return f"; the nearest known one is {error.possibilities[0]}" if error.possibilities else ""


# ---------------------------------------------------------------------------------------------- configuration


class DeploymentCommand(click.Command):
    """A command that takes the whole configuration: every dotted key is an option, listed by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--config", "config_file"],
                type=click.Path(path_type=Path),
                help=f"The deployment file (YAML).  [default: {DEFAULT_FILE}, if there is one]",
            )
        )
        self.params.extend(_key_option(key) for key in known_keys().values())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        keyed = {_identifier(key): key for key in known_keys().values()}
        own = [
            entry for param in self.get_params(ctx) if param.name not in keyed if (entry := param.get_help_record(ctx))
        ]
        with formatter.section("Options"):
            formatter.write_dl(own)
        for (section, backends), rows in _help_rows(keyed.values()).items():
            condition = f", with {section}.backend {' or '.join(backends)}" if backends else ""
            with formatter.section(f"Section {section}{condition}"):
                formatter.write_dl(rows, col_max=40)


def _identifier(key: Key) -> str:
    return key.dotted.replace(".", "__").replace("-", "_")


def _key_option(key: Key) -> click.Option:
    truth: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if key.expected == "true or false" else {}
    return click.Option([f"--{key.dotted}", _identifier(key)], type=str, help=key.description, **truth)


def _help_rows(keys: Iterable[Key]) -> dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]]:
    """Option and explanation of each key, by section and the backends that have it."""
    rows: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for key in keys:
        default = DERIVED_DEFAULTS.get(key.dotted) or ("" if key.required else inline_yaml(key.default))
        need = "required" if key.required else f"default: {default}"
        row = (f"--{key.dotted}", f"{key.description}  [{key.expected}; {need}]")
        rows.setdefault((key.section, key.backends), []).append(row)
    return rows


def _resolve(config_file: Path | None, keyed: dict[str, str | None]) -> Resolved:
    """The configuration from the file, the environment and the dotted options. Raises ConfigError."""
    by_identifier = {_identifier(key): key.dotted for key in known_keys().values()}
    flags = {by_identifier[name]: text for name, text in keyed.items() if text is not None}
    if config_file is None and Path(DEFAULT_FILE).is_file():
        config_file = Path(DEFAULT_FILE)
    return resolve(file=config_file, environ=os.environ, flags=flags)


@root.command(cls=DeploymentCommand)
@click.option("--print-config", is_flag=True, help="Print the resolved file, each value with its origin, and exit.")
def serve(config_file: Path | None, print_config: bool, **keyed: str | None) -> None:
    """Serve a model, record every exchange, and (with a trainer) learn from the reports.

    \b
    Examples:
      reef serve --inference.model-path DIR
      reef serve --inference.upstream-url https://HOST/v1        in front of a provider: record only
      reef serve --inference.model-path DIR --training.backend torch --recipe.batch-size 16
      reef serve --config reef.yaml --print-config

    A value comes from, lowest first: default, YAML file, environment (recipe.batch-size is REEF_RECIPE__BATCH_SIZE),
    flag. Lists are JSON or a,b; mappings are JSON or k=v,k=v.
    """
    resolved = _resolve(config_file, keyed)
    if print_config:
        click.echo(resolved.to_yaml(), nl=False)
        return
    for warning in resolved.warnings:
        click.echo(f"reef: warning: {warning}", err=True)
    from reef.service.app import serve as run

    run(resolved.config)


@root.command(cls=DeploymentCommand)
def coordinator(config_file: Path | None, **keyed: str | None) -> None:
    """Run engines and trainer in a process of their own, for a service that is started, restarted or moved freely.

    Both take the same configuration and share reef.data-dir. The service finds the coordinator, and its replacement,
    by the file that execution.coordinator names.

    \b
    Example:
      reef coordinator --config reef.yaml
      reef serve --config reef.yaml --execution.runtime coordinator_training
    """
    resolved = _resolve(config_file, keyed)
    from reef.service.coordinator import run_coordinator

    run_coordinator(resolved.config)


@root.command(cls=DeploymentCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(config_file: Path | None, as_json: bool, **keyed: str | None) -> None:
    """Check that this machine can run the deployment; takes the same configuration as `serve`.

    \b
    Example:
      reef doctor --inference.model-path DIR --training.backend torch

    Exit code 0: nothing stands in the way; 1: a check failed, and its line says what to do.
    """
    from reef.doctor import examine

    problem: ConfigError | None = None
    config = None
    try:
        config = _resolve(config_file, keyed).config
    except ConfigError as error:
        problem = error
    checks = examine(config, problem)
    if as_json:
        _print_json([check.as_dict() for check in checks])
    else:
        _print_table(
            [[check.name, check.verdict, " ".join(filter(None, [check.detail, check.advice]))] for check in checks],
            ["check", "verdict", "what was found"],
        )
    raise click.exceptions.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


@root.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling and training.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps.  [default: the demo's own]")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".reef/demo"),
    show_default=True,
    help="Directory for report.json and the learning curve.",
)
@click.option("--keep", is_flag=True, help="Keep the deployment's data directory.")
def demo(seed: int, steps: int | None, output: Path, keep: bool) -> None:
    """Watch a small real model learn a task from feedback, then roll it back.

    \b
    Example:
      reef demo --seed 1 --output demo-1
    """
    from reef.demo.run import main as run

    raise click.exceptions.Exit(run(seed=seed, steps=steps, output=output, keep=keep))


@root.command()
@click.option("--role", "roles", multiple=True, type=click.Choice(["infer", "report", "admin"]), help="Default: all.")
@click.option("--scenario", "scenarios", multiple=True, help="Only for these scenarios.  [default: all]")
@_as_json
def token(roles: tuple[str, ...], scenarios: tuple[str, ...], as_json: bool) -> None:
    """Make a bearer token. Its secret is shown once, and nowhere kept; reef.tokens takes its digest.

    \b
    Examples:
      reef token
      reef token --role infer --role report --scenario support
    """
    import secrets

    from reef.service.config import digest_of

    secret = f"reef_{secrets.token_urlsafe(32)}"
    entry: dict[str, Any] = {"digest": digest_of(secret)}
    entry |= {name: list(given) for name, given in (("roles", roles), ("scenarios", scenarios)) if given}
    if as_json:
        _print_json({"secret": secret, **entry})
        return
    click.echo(f"secret, for the client (REEF_TOKEN, or its API key): {secret}")
    click.echo(f"entry of reef.tokens, for the deployment file:\n\nreef:\n  tokens:\n    - {inline_yaml(entry)}")


# ---------------------------------------------------------------------------------------------- a running Reef


def _connection(command: Command) -> Command:
    """Add the options that every command to a running Reef takes."""
    url = click.option("--url", envvar="REEF_URL", default=DEFAULT_URL, show_default=True, help="The Reef to talk to.")
    token = click.option("--token", envvar="REEF_TOKEN", help="Bearer token; better given as REEF_TOKEN.")
    return url(token(command))


_scenario = click.option("--scenario", envvar="REEF_SCENARIO", help="Scenario.  [default: the deployment's default]")


def _scenario_of(client: ReefClient, scenario: str | None) -> str:
    return scenario or str(client.get("/reef/status")["default_scenario"])


@root.command()
@click.argument("receipts", nargs=-1, required=True)
@click.option("--score", type=float, help="How good the answers were; a finite number.")
@click.option("--feedback", help="Feedback: text, or a JSON object.")
@click.option("--error", help="The grader failed, and why; instead of a score. Counted, never trained on.")
@click.option(
    "--metadata", default="{}", help="A JSON object; reports that share `group` are compared with each other."
)
@click.option("--id", "record_id", help="Id of this report, so that sending it again is harmless.")
@_scenario
@_as_json
@_connection
def report(
    receipts: tuple[str, ...],
    score: float | None,
    feedback: str | None,
    error: str | None,
    metadata: str,
    record_id: str | None,
    scenario: str | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Judge answers by their RECEIPTS (the response header x-reef-agent-record-id).

    \b
    Examples:
      reef report RECEIPT --score 1
      reef report RECEIPT --score 0.3 --feedback "too long" --metadata '{"group": "task-7"}'
      reef report RECEIPT --error "the grader timed out"
    """
    body: dict[str, Any] = {"references": list(receipts), "score": score, "error": error, "agent_record_id": record_id}
    structured = feedback is not None and feedback.startswith("{")
    body["feedback"] = _json_object(str(feedback), "--feedback") if structured else feedback
    body["metadata"] = _json_object(metadata, "--metadata")
    given = {name: value for name, value in body.items() if value not in (None, {})}
    client = ReefClient(url, token)
    answer = client.post("/reef/report", given, {"x-reef-scenario": scenario} if scenario else {})
    if as_json:
        _print_json(answer)
    else:
        click.echo(f"stored as {answer['agent_record_id']}")


@root.command()
@_as_json
@_connection
def status(url: str, token: str | None, as_json: bool) -> None:
    """What the deployment serves, what it learns, and what waits.

    \b
    Example:
      reef status --json
    """
    answer = ReefClient(url, token).get("/reef/status")
    if as_json:
        _print_json(answer)
    else:
        click.echo("\n".join(_status_lines(answer)))


@root.command()
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many.")
@_scenario
@_as_json
@_connection
def releases(limit: int, scenario: str | None, url: str, token: str | None, as_json: bool) -> None:
    """The release chain, newest first.

    \b
    Example:
      reef releases --limit 5
    """
    client = ReefClient(url, token)
    answer = client.get(client.scenario_path(_scenario_of(client, scenario), "releases"), {"limit": limit})
    if as_json:
        _print_json(answer)
        return
    columns = ["number", "release_id", "kind", "content_id", "runtime_load_id", "created_at", "source_release_id"]
    _print_table([[item.get(column) for column in columns] for item in answer["releases"]], columns)


@root.command()
@click.argument("release_id", required=False)
@_scenario
@_as_json
@_connection
def rollback(release_id: str | None, scenario: str | None, url: str, token: str | None, as_json: bool) -> None:
    """Serve an earlier release's content again, as a new release; without RELEASE_ID the head's parent.

    \b
    Examples:
      reef rollback
      reef rollback RELEASE_ID --scenario support
    """
    client = ReefClient(url, token)
    path = client.scenario_path(_scenario_of(client, scenario), "rollback")
    answer = client.post(path, {"release_id": release_id} if release_id else {})
    _print_release(answer, as_json)


@root.command()
@click.argument("release_id", required=False)
@click.option("--job", help="Promote the candidate of this training job instead of a release.")
@_scenario
@_as_json
@_connection
def promote(
    release_id: str | None, job: str | None, scenario: str | None, url: str, token: str | None, as_json: bool
) -> None:
    """Publish a stored release, or a candidate that evaluation rejected, as the new head.

    \b
    Examples:
      reef promote RELEASE_ID
      reef promote --job JOB_ID
    """
    if (release_id is None) == (job is None):
        raise click.UsageError("give either RELEASE_ID or --job JOB_ID")
    client = ReefClient(url, token)
    path = client.scenario_path(_scenario_of(client, scenario), "promote")
    answer = client.post(path, {"release_id": release_id} if release_id else {"job_id": job})
    _print_release(answer, as_json)


@root.command()
@click.option("--kind", type=click.Choice(["inference", "report", "instruction"]), help="Only records of this kind.")
@click.option("--since", type=float, help="Only records from this Unix time on.")
@click.option("--until", type=float, help="Only records before this Unix time.")
@click.option(
    "--detail",
    type=click.Choice(["full", "summary"]),
    default="full",
    show_default=True,
    help="Token ids and log-probabilities, or their number.",
)
@click.option("--output", type=click.File("w", lazy=True), default="-", help="File.  [default: standard output]")
@_scenario
@_connection
def records(output: IO[str], scenario: str | None, url: str, token: str | None, **filters: Any) -> None:
    """Export a scenario's records as JSON lines, oldest first.

    \b
    Examples:
      reef records --kind report --output reports.jsonl
      reef records --since 1767225600 --detail summary | head
    """
    client = ReefClient(url, token)
    for record in client.records(_scenario_of(client, scenario), **filters):
        output.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


# ---------------------------------------------------------------------------------------------- the database


class StorageGroup(click.Group):
    """`reef storage`, imported when it is used."""

    def _loaded(self) -> click.Group:
        from reef.cli_storage import storage

        return storage

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._loaded().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self._loaded().get_command(ctx, cmd_name)


@root.group(cls=StorageGroup)
def storage() -> None:
    """Move the database that holds records and releases, or empty what retention no longer keeps."""


@storage.command(cls=DeploymentCommand)
def compact(config_file: Path | None, **keyed: str | None) -> None:
    """Empty now what storage.retention-* no longer keeps; takes the same configuration as `serve`.

    \b
    Example:
      reef storage compact --config reef.yaml --storage.retention-days 30

    A running service does this by itself, in small batches. Hashes stay; nothing that may still train is touched.
    """
    from reef.cli_storage import compact as run

    config = _resolve(config_file, keyed).config
    run(config.storage, Path(config.reef.data_dir))


root.add_command(verify)


@root.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), required=False)
def completion(shell: str | None) -> None:
    """Print what makes a shell complete commands, options and every key of the configuration.

    Without SHELL it is the one that $SHELL names.

    \b
    Examples:
      source <(reef completion bash)                             now, in this shell
      reef completion bash >> ~/.bashrc                          in every new one
      reef completion fish > ~/.config/fish/completions/reef.fish
    """
    from click.shell_completion import get_completion_class

    wanted = shell or Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(wanted)
    if found is None:
        raise click.UsageError(f"SHELL must be bash, zsh or fish, got {wanted!r}")
    click.echo(found(root, {}, "reef", "_REEF_COMPLETE").source())


# ---------------------------------------------------------------------------------------------- printing


def _json_object(text: str, option: str) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(text)
        if isinstance(document, dict):
            return document
    raise click.UsageError(f"{option} must be a JSON object, got {text!r}")


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_release(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(answer)
        return
    click.echo(f"release {answer['number']} ({answer['release_id']}) now serves {answer['content_id']}")


HERE = "this process"
SETTLED = ("complete", "rejected")


def _status_lines(answer: Mapping[str, Any]) -> list[str]:
    """The deployment, its engines and each scenario, a line or two each."""
    health = "; ".join(answer["health"]) or "healthy"
    lines = [f"{answer['model']}, up {answer['uptime_seconds']:.0f} s, {health}"]
    if answer.get("training_health"):
        lines.append(f"training: {answer['training_health']}")
    if answer.get("trains", HERE) != HERE:
        lines.append(f"trains: {answer['trains']}")
    if (job := answer.get("job")) and job["state"] not in SETTLED:
        lines.append(f"job {job['job_id']} of {job['scenario']}: {job['state']}")
    if (pause := answer.get("last_pause_seconds")) is not None:
        lines.append(f"last pause: {1000 * pause:.0f} ms")
    for engine in answer["engines"]:
        lines.append(
            f"{engine['engine']}: {engine['running']} running, {engine['waiting']} waiting, "
            f"{engine['free_pages']} of {engine['total_pages']} pages free"
        )
    for scenario in answer["scenarios"]:
        head, counts, waiting = scenario["head"], scenario["counts"], scenario["waiting"]
        lines.append(
            f"{scenario['scenario']}: serves release {head['number']} ({head['kind']}, {head['runtime_load_id']}); "
            f"{counts['inference']} answers, {counts['report']} reports, recipe {scenario['recipe']}"
        )
        spent = {name.removeprefix("consumed."): n for name, n in counts.items() if name.startswith("consumed.") and n}
        for title, numbers in (("waits", {name: n for name, n in waiting.items() if n}), ("consumed", spent)):
            if numbers:
                lines.append(f"  {title}: " + ", ".join(f"{n} {name}" for name, n in numbers.items()))
        if (use := scenario.get("prefixes")) and use["prompt_tokens"]:
            share = use["hit_tokens"] / use["prompt_tokens"]
            lines.append(
                f"  prefixes: {share:.0%} of {use['prompt_tokens']} prompt tokens cached, "
                f"{use['recomputed_tokens']} tokens computed again"
            )
        for title, text in (("last", scenario["last_outcome"]), ("trouble", scenario["error"])):
            if text:
                lines.append(f"  {title}: {text}")
    return lines


def _print_table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> None:
    """A table for people; where output is no terminal, tab-separated lines without a frame."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(_cell(column, value) for column, value in zip(columns, row, strict=True)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column.endswith("_id"))
    for row in rows:
        table.add_row(*(_cell(column, value) for column, value in zip(columns, row, strict=True)))
    Console().print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "created_at":
        return datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    if column == "content_id":
        return str(value)[:8]
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()
