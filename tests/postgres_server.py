"""A PostgreSQL server of our own: made from the binaries on this machine, in a directory, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

SETTINGS = {
    "listen_addresses": "",
    "max_connections": "60",
    "shared_buffers": "16MB",
    "deadlock_timeout": "100ms",
    "logging_collector": "off",
}


def binaries() -> Path | None:
    """The directory of the newest server on this machine."""
    found = shutil.which("initdb")
    if found is not None and (Path(found).resolve().parent / "postgres").exists():
        return Path(found).resolve().parent
    newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return newest[-1].parent if newest else None


class Server:
    """Refuses to run as root, so root starts it as `postgres` or `nobody`."""

    def __init__(self, directory: Path, programs: Path, *, fsync: bool) -> None:
        self.directory = directory
        self._settings = {**SETTINGS, "fsync": "on" if fsync else "off"}
        self._programs = programs
        self._data = directory / "data"
        self._user = next(
            (user for user in ("postgres", "nobody") if os.geteuid() == 0 and _exists(user)), None
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://reef:secret@/postgres?host={self.directory}"

    def create(self) -> None:
        if self._user is not None:
            shutil.chown(self.directory, self._user)
        password = self.directory / "password"
        password.write_text("secret")
        password.chmod(0o644)
        self._run(
            "initdb", "-D", str(self._data), "-U", "reef", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync",
            "--encoding=UTF8", "--locale=C",
        )  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], user=self._user, extra_groups=[] if self._user else None,
            cwd=self.directory, capture_output=True, timeout=200, check=False, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, "-k", self.directory, *settings],
                user=self._user,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                extra_groups=[] if self._user else None,
            )
        deadline = time.monotonic() + 100
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        """As a power cut would, as far as processes go: the postmaster dies at once, its children after it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(100)

    def stop(self) -> None:
        """At once, without a checkpoint."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(3)  # SIGQUIT: immediate shutdown
            self._process.wait(100)

    def empty(self, schema: str) -> None:
        """As if the schema had just been made, if it has been; much faster than making one."""
        if self.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", schema):
            tables = "records", "pending", "consumption", "counts", "scenarios", "releases", "commits", "sequences"
            statements = [f"DELETE FROM {schema}.{table}" for table in tables]
            statements.append(f"INSERT INTO {schema}.sequences VALUES ('load', 0)")
            statements.append(f"UPDATE {schema}.lease SET holder = '', epoch = 0, expires = 0")
            statements.append(f"ALTER TABLE {schema}.records ALTER COLUMN seq RESTART")
            self.execute("; ".join(statements))

    def execute(self, statement: str, *values: object) -> list[tuple]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


@contextmanager
def running_server(*, fsync: bool = False, directory: Path | None = None) -> Iterator[Server]:
    """Not below pytest's directories: those let nobody else in, and their names are too long for a socket.

    Without `fsync` it survives the death of processes, which is what tests bring about, but not of the machine.
    """
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server (initdb, postgres) on this machine")
    with tempfile.TemporaryDirectory(prefix="reef-postgres-", dir=directory, ignore_cleanup_errors=True) as name:
        server = Server(Path(name), programs, fsync=fsync)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
