"""Handing the device that engines and trainer share from the one to the other, and back.

::

    engines                                trainer
    serve                                  holds nothing
    pause (retract), release ────────────► take
    requests wait                          the step: load, train, write the candidate
    restore, committed heads, resume ◄──── release
    serve; load the candidate ...          holds nothing

At any moment one of the two has the device. Every hand-over is acknowledged; whoever fails one is replaced, and the
other gets the device only once that process is known to be gone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator

from reef.errors import ReefError, WorkerDied
from reef.points import Point, crossing
from reef.runtime.interfaces import MemoryRegion, MemoryReport, TrainingBackend
from reef.runtime.publication import Publication

log = logging.getLogger("reef.colocation")

ENGINE_REGIONS = frozenset({MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE})
TRAINER_REGIONS = frozenset({MemoryRegion.WEIGHTS, MemoryRegion.OPTIMIZER})


class Colocation:
    """Owns the trainer's life in a colocated deployment. Blocking; the coordinator's thread calls it."""

    def __init__(
        self, publication: Publication, trainer: TrainingBackend, resident: Collection[MemoryRegion] = ()
    ) -> None:
        """`resident` regions stay with the engines during a step; a trainer that starts gets the whole device."""
        self._publication = publication
        self._trainer = trainer
        self._regions = ENGINE_REGIONS - set(resident)
        self._trainer_holds = False
        self.reports: dict[str, list[MemoryReport]] = {}  # of the newest hand-overs, in order
        self.step_seconds: float | None = None  # for which the newest step kept requests waiting

    def start_trainer(self, *, resume: bool) -> None:
        """Start the trainer, for the first time or again. How much it takes to begin is unknown, so it gets all."""
        self._lend(ENGINE_REGIONS)
        try:
            self._trainer_holds = True
            self._trainer.start()
        except BaseException:
            with contextlib.suppress(ReefError):  # the first error counts; the engines' own state shows this one
                self._take_back(resume=resume)
            raise
        self._take_back(resume=resume)
        if reason := self._trainer.health():
            raise WorkerDied(reason)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The trainer has the device inside the block; afterwards the engines serve again, or wait to be replaced.

        Raises WorkerDied or EngineUncertain if the device could not be handed over.
        """
        if reason := self._trainer.health():
            raise WorkerDied(reason)
        began = time.monotonic()
        self._lend(self._regions)
        try:
            self._admit_trainer()
            yield
        finally:
            try:
                self._take_back(resume=True)
            except ReefError as error:  # whatever the step made stays valid
                log.warning("the engines are to be replaced after the step: %s", error)
            self.step_seconds = time.monotonic() - began

    def make_room(self) -> None:
        """Before engines are replaced: nobody else has the device. Raises what keeps the trainer from leaving it."""
        if not self._trainer_holds:
            return
        try:
            with crossing(Point.GIVE_BACK_DEVICE):
                report = self._trainer.release_memory()
            self._log("trainer release", [report])
            if missing := TRAINER_REGIONS - set(report.released):
                raise WorkerDied(f"the trainer did not release {', '.join(sorted(missing))}")
        except Exception as error:  # from here on it is unusable
            log.warning("the trainer is closed: it did not give the device back (%s)", error)
            self._trainer.close()  # returns once it is gone
        self._trainer_holds = False

    def _lend(self, regions: Collection[MemoryRegion]) -> None:
        self._log("engines release", self._publication.lend(regions))

    def _take_back(self, *, resume: bool) -> None:
        try:
            self.make_room()
        except ReefError as error:
            self._publication.retire(f"the trainer still has the device: {error}")
            raise
        self._log("engines restore", self._publication.reclaim(resume=resume))

    def _admit_trainer(self) -> None:
        self._trainer_holds = True
        try:
            with crossing(Point.TAKE_DEVICE):
                report = self._trainer.restore_memory()
            self._log("trainer restore", [report])
            if report.released:
                raise WorkerDied(f"the trainer did not restore {', '.join(sorted(report.released))}")
        except Exception as error:  # from here on it is unusable
            self._trainer.close()
            raise WorkerDied(f"the trainer could not take the device: {error}") from error

    def _log(self, what: str, reports: list[MemoryReport]) -> None:
        self.reports.pop(what, None)
        self.reports[what] = reports
        for one in reports:
            log.info(
                "%s: %s went from %.1f to %.1f MB; %.1f MB of the device are free",
                what,
                one.owner,
                one.bytes_before / 1e6,
                one.bytes_after / 1e6,
                one.device_free / 1e6,
            )
