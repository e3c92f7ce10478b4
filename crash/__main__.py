"""`python -m crash`: see the package."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from crash.kills import KINDS, Kill, Kind, interleaved, kills_of
from crash.misfortune import problems
from crash.model import make_model
from crash.report import Session, line, read_sessions, write
from crash.run import Run

MISFORTUNE = "misfortune"
DIRECTORY = Path(".reef") / "crash"


def main(arguments: list[str] | None = None) -> int:
    """Run the kills; 0 if every invariant held and every point was reached."""
    options = _options(arguments)
    directory = DIRECTORY.absolute()
    if not options.resume and not options.list:
        shutil.rmtree(directory, ignore_errors=True)
    chosen = [(kind, kills) for kind in KINDS if (kills := _chosen(kind, options, directory))]
    if options.list:
        for kind, kills in chosen:
            for kill in kills:
                print(f"{kind.name:18} {kill.victim:8} {kill.name}")
        print(f"{sum(len(kills) for _, kills in chosen)} kills")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    model = make_model(directory / "model")
    deadline = time.monotonic() + options.seconds
    total, done = sum(len(kills) for _, kills in chosen), 0
    flags = dict(flag.split("=", 1) for flag in options.flag)
    for kind, kills in chosen:
        if kind.missing:
            print(f"{kind.name} is left out: {', '.join(kind.missing)} is not installed", flush=True)
            continue
        if time.monotonic() > deadline:
            break
        with Run(kind, model, _fresh(directory, kind.name), options.seed, flags) as run:
            for kill in kills:
                if time.monotonic() > deadline:
                    break
                done += 1
                print(line(run.kill(kill), run.session, done, total), flush=True)
            run.conclude()
    if not options.kind or MISFORTUNE in options.kind:
        where = _fresh(directory, MISFORTUNE)
        session = Session(kind=MISFORTUNE, misfortunes=problems(model, where))
        session.write(where)
    return 0 if write(read_sessions(directory), directory / "report.json") else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("--kind", action="append", help="only this deployment; may be repeated: "
                        + ", ".join([*(kind.name for kind in KINDS), MISFORTUNE]))  # fmt: skip
    parser.add_argument("--point", action="append", help="only kills whose name begins so; may be repeated")
    parser.add_argument("--victim", action="append", help="only kills of this component: service, engine, trainer")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the kills, others in each deployment")
    parser.add_argument("--offset", type=int, default=0, help="with --every: which ones")
    parser.add_argument("--flag", action="append", default=[], metavar="KEY=VALUE", help="of the deployment, such as "
                         "storage.backend=postgres; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so long")
    parser.add_argument("--resume", action="store_true", help="go on with what .reef/crash holds, repeating no kill")
    parser.add_argument("--list", action="store_true", help="print the kills and run none")
    return parser.parse_args(arguments)


def _chosen(kind: Kind, options: argparse.Namespace, directory: Path) -> list[Kill]:
    if options.kind and kind.name not in options.kind:
        return []
    done = {(one.victim, one.name) for session in read_sessions(directory) for one in session.outcomes
            if one.kind == kind.name}  # fmt: skip
    kills = [
        kill
        for kill in kills_of(kind)[(KINDS.index(kind) + options.offset) % options.every :: options.every]
        if (not options.point or kill.name.startswith(tuple(options.point)))
        and (not options.victim or kill.victim in options.victim)
        and (kill.victim, kill.name) not in done
    ]
    return interleaved(kills)


def _fresh(directory: Path, name: str) -> Path:
    number = 1
    while (found := directory / f"{name}-{number}").exists():
        number += 1
    return found


if __name__ == "__main__":
    sys.exit(main())
