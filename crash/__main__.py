"""`python -m crash`: see the package."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from crash.kills import KINDS, Kill, Kind, interleaved, kills_of
from crash.model import make_model
from crash.report import line, summary, write
from crash.run import Run

DIRECTORY = Path(".reef") / "crash"


def main(arguments: list[str] | None = None) -> int:
    """Run the kills; 0 if every invariant held and every point was reached."""
    options = _options(arguments)
    kinds = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    chosen = {kind.name: _chosen(kind, options) for kind in kinds}
    if options.list:
        for kind in kinds:
            for kill in chosen[kind.name]:
                print(f"{kind.name:14} {kill.victim:8} {kill.name}")
        print(f"{sum(map(len, chosen.values()))} kills")
        return 0
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    directory = DIRECTORY.absolute()
    directory.mkdir(parents=True)
    model = make_model(directory / "model")
    flags = dict(flag.split("=", 1) for flag in options.flag)
    started, runs = time.monotonic(), []
    total = sum(map(len, chosen.values()))
    for kind in kinds:
        with Run(kind, model, directory / kind.name, options.seed, flags) as run:
            runs.append(run)
            for kill in chosen[kind.name]:
                outcome = run.kill(kill)
                print(line(outcome, run, sum(len(each.outcomes) for each in runs), total), flush=True)
            run.conclude()
    report = summary(runs, time.monotonic() - started)
    write(report, directory / "report.json")
    return 0 if report["passed"] else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("--kind", action="append", help="only this deployment; may be repeated: "
                        + ", ".join(kind.name for kind in KINDS))  # fmt: skip
    parser.add_argument("--point", action="append", help="only kills whose name begins so; may be repeated")
    parser.add_argument("--victim", choices=("service", "engine", "trainer"), help="only kills of this component")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the kills that are left")
    parser.add_argument("--flag", action="append", default=[], metavar="KEY=VALUE", help="of the deployment, such as "
                        "storage.backend=postgres; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--list", action="store_true", help="print the kills and run none")
    return parser.parse_args(arguments)


def _chosen(kind: Kind, options: argparse.Namespace) -> list[Kill]:
    kills = [
        kill
        for kill in kills_of(kind)
        if (not options.point or kill.name.startswith(tuple(options.point)))
        and (not options.victim or kill.victim == options.victim)
    ]
    return interleaved(kills[:: options.every])


if __name__ == "__main__":
    sys.exit(main())
