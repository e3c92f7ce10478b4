"""A few of the kills of `make crash`: each component, inside a publication, in the middle of recovery."""

from __future__ import annotations

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from crash.kills import KINDS, RECOVERY, Kill, kills_of  # noqa: E402
from crash.model import make_model  # noqa: E402
from crash.run import Run  # noqa: E402
from reef.points import Point  # noqa: E402

KILLS = (
    Kill(Point.ENGINE_ACTIVATE, "before", "engine"),
    Kill(Point.TRAINER_WRITE, "before", "trainer"),
    Kill(Point.COMMIT, "after", "service", then=(Point.RESTORE, "after")),
    Kill(Point.APPEND_RECORD, "after", "service"),
)


def test_every_point_is_killed_on_both_sides_in_some_deployment():
    found = {(kill.point, kill.side) for kind in KINDS for kill in kills_of(kind)}
    assert {(point, side) for point in Point for side in ("before", "after")} <= found
    assert sum(len(kills_of(kind)) for kind in KINDS) >= 300 and len(RECOVERY) > 10


@pytest.mark.timeout(240)
def test_nothing_is_lost_and_everything_serves_again(tmp_path):
    with Run(KINDS[0], make_model(tmp_path / "model"), tmp_path / "run") as run:
        problems = [problem for kill in KILLS for problem in run.kill(kill).problems]
        run.conclude()
    assert "\n".join(problems) == ""
    assert "\n".join(run.audit.findings.everything()) == ""
    assert len(run.outcomes) == len(KILLS) and all(outcome.seconds is not None for outcome in run.outcomes)
    assert run.audit.releases > 2 and run.rescorer.answers > 10
