"""The command `reef verify`."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from reef.progress import bars
from reef.verify.recorded import Selection, check


class _Moment(click.ParamType[float]):
    """Unix seconds, or an ISO date or time; without a zone it is UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with suppress(ValueError):
            return float(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r} is neither Unix seconds nor a date such as 2026-01-31 or 2026-01-31T12:00", param, ctx
            )
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(".reef/data"),
    show_default=True,
    help="The deployment's data directory.",
)
@click.option("--scenario", envvar="REEF_SCENARIO", help="Only this scenario.  [default: all]")
@click.option("--sample", type=click.IntRange(min=1), help="Only so many answers of each scenario, drawn at random.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sample.")
@click.option("--since", type=_Moment(), help="Only answers from this time on: Unix seconds or an ISO date.")
@click.option("--until", type=_Moment(), help="Only answers before this time.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Largest difference of a token in nats.  [default: 0.001 for float32 engines; what the directory says]",
)
@click.option(
    "--model-path", type=click.Path(path_type=Path, exists=True), help="Base model.  [default: as served last]"
)
@click.option(
    "--database",
    help="Another database than the one served last: a file, or postgresql://user@host/name?schema=NAME.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def verify(
    data_dir: Path,
    scenario: str | None,
    sample: int | None,
    seed: int,
    since: float | None,
    until: float | None,
    tolerance: float | None,
    model_path: Path | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Prove that recorded answers came from the weights they name.

    \b
    Examples:
      reef verify                                   every answer of every scenario
      reef verify --scenario support --sample 200   a sample of one
      reef verify --since 2026-01-31 --json         the newest, for a program

    Each answer is computed again with transformers in float32, under the release that each of its spans names, and its
    log-probabilities are compared with the recorded ones. That finds stale caches, wrong adapters, wrong spans, and
    records, adapters or checkpoints that were changed after the fact. It needs the data directory and the base model
    alone, changes nothing, and may run beside a service or without one. Records in PostgreSQL are found as well; the
    directory keeps no password, so give it as PGPASSWORD or in ~/.pgpass.

    Of an answer that a publication crossed, tokens may rest on keys and values of the older weights; where the release
    was published with pause mode in_place that is right, and they are counted as "on older KV".

    Exit code 0: all within the tolerance; 1: something is not what was recorded, and a line says what.
    """
    selection = Selection(scenario=scenario, sample=sample, since=since, until=until, seed=seed)
    with bars(not as_json) as progress:
        report = asyncio.run(
            check(
                data_dir,
                selection,
                model_path=model_path,
                database=database,
                tolerance=tolerance,
                progress=progress,
            )
        )
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(report.lines()))
    raise click.exceptions.Exit(0 if report.clean else 1)
