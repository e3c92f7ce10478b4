"""One deployment through its kills, and what is left to say about all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from crash.audit import Audit
from crash.deployment import Deployment, Unrecovered
from crash.disk import SmallDisk
from crash.kills import DISK, Kill, Kind, Trigger
from crash.load import Load
from crash.report import Outcome, Session
from crash.rescore import Rescorer
from reef.errors import ReefError
from reef.points import Plan, Point, Side, Signal

SCENARIOS = ["alpha", "beta"]
REACH_SECONDS = 600.0
RECOVER_SECONDS = 600.0
FLAGS: dict[str, object] = {
    "inference.threads": 1,
    "inference.kv-cache-tokens": 8192,
    "inference.dtype": "float32",
    "training.backend": "torch",
    "training.threads": 1,
    "training.learning-rate": 0.003,
    "recipe.batch-size": 4,
    "evaluation.plugin": "crash.evaluator",
    "inference.max-loads": len(SCENARIOS) + 1,  # so that every release but the first few evicts an older one
    "reef.default-scenario": SCENARIOS[0],
}
BACK_TO_BASE_EVERY = 15
"""Releases between two rollbacks to release 0: random scores for hours would teach the model something extreme."""
WORKER_DEATHS, WORKER_SECONDS = 3, 310.0
"""Of one component in one service's life: it gives up at the fourth within five minutes."""


class Run:
    """Drives one kind of deployment. Use it as a context manager: it leaves no process behind."""

    def __init__(
        self, kind: Kind, model: Path, directory: Path, seed: int = 0, flags: Mapping[str, object] | None = None
    ) -> None:
        self.kind = kind
        where = SmallDisk if kind.disk else Deployment
        self.deployment = where(directory, {**FLAGS, **kind.flags, **(flags or {}), "inference.model-path": model})
        self.load = Load(self.deployment.port, SCENARIOS, seed)
        self.rescorer = Rescorer(model, lambda: self.deployment.seen)
        self.audit = Audit(self.deployment.client, self.load.ledger, self.rescorer, seed)
        self.session = Session(kind=kind.name)
        self._begun = time.monotonic()
        self._deaths: dict[str, list[float]] = {}  # of each worker, when
        self._made = 0
        self._based: dict[str, int] = {}  # number of the last release that went back to the base

    def __enter__(self) -> Run:
        self.deployment.start()
        self.deployment.wait_until_healthy(RECOVER_SECONDS)
        for name in SCENARIOS:
            self.deployment.client.post("/reef/scenarios", {"name": name})
        self.load.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.load.stop()
        self.deployment.end()

    # ------------------------------------------------------------------ one kill

    def kill(self, kill: Kill) -> Outcome:
        """Make it happen, wait until the deployment serves again, and check everything."""
        outcome = Outcome(self.kind.name, kill.name, str(kill.point), kill.victim, problems=[])
        self.session.outcomes.append(outcome)
        try:
            if kill.victim == DISK:
                self._fill_disk(kill, outcome)
            else:
                self._make_room(kill)
                pid = self.deployment.pid if kill.victim == "service" else self._find(kill.victim)
                self._recover(kill, outcome, self._strike(kill, pid), pid)
        except (Unrecovered, ReefError) as error:
            outcome.problems.append(f"unrecovered: {error}\n{self.deployment.tail()}")
            self._start_over()
        before = len(self.audit.findings.everything())
        with suppress(ReefError):
            self.audit.check(SCENARIOS)
        outcome.problems += self.audit.findings.everything()[before:]
        self._note()
        self._back_to_base()
        return outcome

    def _note(self) -> None:
        """What is known so far, in the session's file."""
        session, findings, ledger = self.session, self.audit.findings, self.load.ledger
        session.lost_receipts = len(findings.lost_receipts)
        session.double_trained = len(findings.double_trained)
        session.uncommitted_served = len(findings.uncommitted_served)
        session.other = list(findings.other)
        session.answers, session.reports = len(ledger.answers), len(ledger.reports)
        session.releases = self.audit.releases
        session.rescored_answers = self.rescorer.answers
        session.rescored_across_publications = self.rescorer.mixed
        session.rescored_cut_streams = self.rescorer.fragments
        session.rescored_ill_conditioned = self.rescorer.ill_conditioned
        session.worst_difference_nats = self.rescorer.worst
        session.seconds = time.monotonic() - self._begun
        session.write(self.deployment.directory)

    def _find(self, component: str) -> int:
        pid = self.deployment.worker(component)
        if pid is None:
            raise Unrecovered(f"there is no {component} to kill")
        return pid

    def _strike(self, kill: Kill, victim: int) -> float:
        """Arm, trigger, and wait for the death; return when it was (Unix seconds)."""
        deployment = self.deployment
        pid = 0 if kill.victim == self.kind.owner(kill.point) else victim
        if kill.trigger == "rollback":
            self._quiet()
        how: Signal = "SIGSTOP" if kill.hangs else "SIGKILL"
        deployment.arm(self._plan(kill.point, kill.side, kill.occurrence, pid, how, kill.linger))
        self._trigger(kill.trigger)
        died_at = self._wait_for_point(f"{kill.point} {kill.side}") + kill.linger
        self.load.reporting.set()
        return died_at

    def _wait_for_point(self, name: str) -> float:
        """Until the plan has fired; return when it did."""
        deadline = time.monotonic() + REACH_SECONDS
        while (fired_at := self.deployment.fired_at()) is None:
            if time.monotonic() > deadline:
                self.deployment.disarm()
                raise Unrecovered(f"{name} was not reached within {REACH_SECONDS:g} s")
            time.sleep(0.02)
        return fired_at

    def _trigger(self, trigger: Trigger) -> None:
        deployment = self.deployment
        with suppress(ReefError):  # it may die before it answers
            if trigger == "instruction":
                answer = deployment.client.post("/reef/train", {"please": "learn"}, {"x-reef-scenario": SCENARIOS[0]})
                with self.load.ledger.lock:
                    self.load.ledger.instructions[answer["agent_record_id"]] = SCENARIOS[0]
            elif trigger == "scenario":
                self._made += 1
                deployment.client.post("/reef/scenarios", {"name": f"made-{self._made}"})
            elif trigger == "rollback":
                self._roll_back()
            elif trigger in ("engine dies", "trainer dies"):
                component = trigger.partition(" ")[0]
                if (pid := deployment.worker(component)) is not None:
                    os.kill(pid, signal.SIGKILL)
            elif trigger == "restart":
                deployment.kill()
                deployment.wait_for_no_process()
                deployment.start()

    def _fill_disk(self, kill: Kill, outcome: Outcome) -> None:
        """Stop at the point, take all space, go on; once healthz says so, give the space back."""
        deployment, owner = self.deployment, self.kind.owner(kill.point)
        assert isinstance(deployment, SmallDisk)
        deployment.arm(self._plan(kill.point, kill.side, kill.occurrence, signal="SIGSTOP"))
        trigger = threading.Thread(target=self._trigger, args=(kill.trigger,))
        trigger.start()
        self._wait_for_point(f"{kill.point} {kill.side}")
        deployment.fill()
        deployment.signal(owner, signal.SIGCONT)
        self._wait_for_reason("no space left")
        deployment.client.get("/v1/models")  # what needs no space goes on
        deployment.client.get("/reef/status")
        trigger.join()
        deployment.free()
        freed_at = time.time()
        deployment.wait_until_healthy(RECOVER_SECONDS)
        outcome.health_seconds = time.time() - freed_at
        self._wait_for_answers()
        outcome.seconds = time.time() - freed_at
        self._wait_for_releases(all)

    def _wait_for_reason(self, words: str) -> None:
        deadline = time.monotonic() + RECOVER_SECONDS
        while words not in (reason := self.deployment.healthy() or "healthy"):
            if time.monotonic() > deadline:
                raise Unrecovered(f"healthz does not say {words!r} within {RECOVER_SECONDS:g} s but {reason!r}")
            time.sleep(0.1)

    def _recover(self, kill: Kill, outcome: Outcome, died_at: float, dead: int) -> None:
        deployment = self.deployment
        if kill.victim == "service":
            self._bury_service()
            if kill.then is not None:
                deployment.arm(self._plan(*kill.then))
                deployment.start()
                died_at = self._die_again(*kill.then)
            deployment.start()
        else:
            self._wait_for_another(kill, dead)
        deployment.wait_until_healthy(RECOVER_SECONDS)
        outcome.health_seconds = time.time() - died_at
        self._wait_for_answers()
        if kill.victim == "trainer":
            self._wait_for_releases(any)
        outcome.seconds = time.time() - died_at

    def _wait_for_another(self, kill: Kill, dead: int) -> None:
        """A service that is only starting when it loses a component may end with the reason; then it starts again."""
        deadline = time.monotonic() + RECOVER_SECONDS
        while (pid := self.deployment.worker(kill.victim)) is None or pid == dead:
            if kill.trigger == "restart" and not self.deployment.running:
                self.deployment.wait_for_no_process()
                self.deployment.start()
            if time.monotonic() > deadline:
                raise Unrecovered(f"the {kill.victim} was not replaced")
            time.sleep(0.05)

    def _die_again(self, point: Point, side: Side) -> float:
        """The recovering service dies at another point."""
        died_at = self._wait_for_point(f"{point} {side} by the recovery")
        self._bury_service()
        return died_at

    def _bury_service(self) -> None:
        """It has to be dead at once, and everything that it started a moment later."""
        if not self.deployment.wait_until_dead(60.0):
            raise Unrecovered("the service survived its SIGKILL")
        self.deployment.wait_for_no_process()
        self._deaths.clear()

    def _wait_for_answers(self) -> None:
        """Every scenario answers again, from its committed head."""
        deadline = time.monotonic() + RECOVER_SECONDS
        for scenario in SCENARIOS:
            body = {"model": "any", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
            while True:
                try:
                    self.deployment.client.post("/v1/chat/completions", body, {"x-reef-scenario": scenario})
                    break
                except ReefError as error:
                    if time.monotonic() > deadline:
                        raise Unrecovered(f"{scenario} does not answer: {error}") from error
                    time.sleep(0.05)

    def conclude(self) -> None:
        """Learning goes on, every receipt ever acknowledged is there, and it stops in good order."""
        try:
            self._wait_for_releases(all)
            self.load.stop()
            self.audit.check(SCENARIOS)
            self.audit.check_all_receipts(SCENARIOS)
            self.deployment.stop()
        except (Unrecovered, ReefError) as error:
            self.audit.findings.other.append(f"at the end: {error}\n{self.deployment.tail()}")
        self._note()

    def _wait_for_releases(self, enough: Callable[[Iterable[bool]], bool]) -> None:
        """In any or all of the scenarios."""
        heads = {name: self._head(name) for name in SCENARIOS}
        deadline = time.monotonic() + REACH_SECONDS
        while not enough(self._head(name) != head for name, head in heads.items()):
            if time.monotonic() > deadline:
                raise Unrecovered(f"no release within {REACH_SECONDS:g} s")
            time.sleep(0.1)

    def _head(self, scenario: str) -> int:
        number: int = self.deployment.client.get(f"/reef/scenarios/{scenario}")["head"]["number"]
        return number

    # ------------------------------------------------------------------ between kills

    def _make_room(self, kill: Kill) -> None:
        """Restart in good order before a component has died as often as the service forgives."""
        victim = kill.trigger.partition(" ")[0] if kill.trigger.endswith("dies") else kill.victim
        if victim == "service":
            return
        now = time.monotonic()
        recent = [died_at for died_at in self._deaths.get(victim, []) if now - died_at < WORKER_SECONDS]
        if len(recent) >= WORKER_DEATHS:
            self.deployment.stop()
            self._deaths.clear()
            self.deployment.start()
            self.deployment.wait_until_healthy(RECOVER_SECONDS)
            recent = []
        self._deaths[victim] = [*recent, time.monotonic()]

    def _start_over(self) -> None:
        """After a failure: nothing of the last run is left, and the next kill finds a deployment that serves."""
        self.load.reporting.set()
        self.deployment.disarm()
        self.deployment.end()
        self._deaths.clear()
        self.deployment.start()
        with suppress(Unrecovered):
            self.deployment.wait_until_healthy(RECOVER_SECONDS)

    def _quiet(self) -> None:
        """No reports, no step in flight, and a release to go back from."""
        deadline = time.monotonic() + REACH_SECONDS
        while not self._head(SCENARIOS[0]):
            if time.monotonic() > deadline:
                raise Unrecovered("there is no release to roll back")
            time.sleep(0.1)
        self.load.reporting.clear()
        while any(self.deployment.client.get(f"/reef/scenarios/{name}")["in_flight"] for name in SCENARIOS):
            if time.monotonic() > deadline:
                raise Unrecovered("a step does not end")
            time.sleep(0.1)

    def _roll_back(self) -> None:
        """To the oldest release; to the one before the head where the oldest serves already."""
        path = f"/reef/scenarios/{SCENARIOS[0]}"
        releases = self.deployment.client.get(f"{path}/releases", {"limit": 1000})["releases"]
        target = releases[-1] if releases[0]["content_id"] != releases[-1]["content_id"] else None
        target = target or next((one for one in releases if one["content_id"] != releases[0]["content_id"]), None)
        if target is not None:
            self.deployment.client.post(f"{path}/rollback", {"release_id": target["release_id"]})

    def _back_to_base(self) -> None:
        for scenario in SCENARIOS:
            with suppress(ReefError):
                if self._head(scenario) - self._based.get(scenario, 0) >= BACK_TO_BASE_EVERY:
                    answer = self.deployment.client.post(f"/reef/scenarios/{scenario}/rollback", {"release_id": "0"})
                    self._based[scenario] = answer["number"]

    def _plan(
        self,
        point: Point,
        side: Side,
        occurrence: int = 1,
        pid: int = 0,
        signal: Signal = "SIGKILL",
        linger: float = 0.0,
    ) -> Plan:
        name = f"{len(self.session.outcomes)}-{time.monotonic_ns()}"
        return Plan(name=name, point=point, side=side, occurrence=occurrence, pid=pid, signal=signal, linger=linger)
