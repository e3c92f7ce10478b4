"""Content-addressed directories of weights, adapters and optimizer state.

    root/blobs/<sha256>              each distinct file once
    root/contents/<content id>/...   hard links to blobs, under the names they were put with
    root/staging/<random>/           what a put or a deletion is at work on, locked by it

A content appears by one rename after everything in it is on disk, so a crash leaves all of it or none of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reef.directories import sync_directory
from reef.errors import NotFound, StorageError
from reef.points import Point, crossing
from reef.runtime.interfaces import ContentStore

_CHUNK = 4 * 1024 * 1024
_CONTENT_ID = re.compile(r"[0-9a-f]{64}")


class DirectoryContentStore(ContentStore):
    """Blocking. Threads and processes may use one root at the same time; it needs a file system with hard links."""

    def __init__(self, root: Path) -> None:
        """Create the directories and sweep what crashed puts left. Raises StorageError."""
        self._blobs = root / "blobs"
        self._contents = contents_of(root)
        self._staging = root / "staging"
        try:
            for directory in (self._blobs, self._contents, self._staging):
                directory.mkdir(parents=True, exist_ok=True)
            sync_directory(root)
            sync_directory(root.parent)
            self._sweep()
        except OSError as error:
            raise StorageError(f"{root}: {error}") from error

    def put(self, directory: Path) -> str:
        """Copy every regular file below `directory`, durably; return the content id.

        Raises ValueError for an empty directory, a symbolic link or a special file; StorageError when the disk
        refuses, and then nothing is stored.
        """
        names = _regular_files(directory)
        try:
            with self._stage() as stage:
                hashes = {name: self._add_file(directory / name, stage, name) for name in names}
                content_id = _content_id(hashes)
                self._publish(stage / "content", content_id)
        except OSError as error:
            raise StorageError(f"{directory} could not be stored: {error}") from error
        return content_id

    def path(self, content_id: str) -> Path:
        if not self.exists(content_id):
            raise NotFound(f"no content {content_id}")
        return self._contents / content_id

    def exists(self, content_id: str) -> bool:
        return _CONTENT_ID.fullmatch(content_id) is not None and (self._contents / content_id).is_dir()

    def retain(self, content_ids: set[str]) -> int:
        with crossing(Point.RETAIN):
            return self._delete_others(content_ids)

    def _delete_others(self, content_ids: set[str]) -> int:
        freed = 0
        try:
            with self._stage() as stage:
                for content in list(self._contents.iterdir()):
                    if content.name not in content_ids:
                        content.rename(stage / content.name)
                sync_directory(self._contents)
            for blob in list(self._blobs.iterdir()):
                found = blob.stat()
                # A put may link it at this very moment: its content keeps the bytes, only later sharing is lost.
                if found.st_nlink == 1:
                    blob.unlink()
                    freed += found.st_size
        except OSError as error:
            raise StorageError(f"{self._contents}: {error}") from error
        return freed

    def _add_file(self, source: Path, stage: Path, name: str) -> str:
        """Copy one file into the staged content, share it with its blob, and return its hash."""
        staged = stage / "content" / name
        staged.parent.mkdir(parents=True, exist_ok=True)
        digest = _copy_file(source, staged)
        blob = self._blobs / digest
        try:
            with crossing(Point.BLOB):
                os.link(staged, blob)
        except FileExistsError:
            shared = stage / "shared"
            try:
                os.link(blob, shared)
            except OSError as error:
                # retain was faster, or the blob has all the links it may have: this content keeps its own copy.
                if error.errno not in (errno.ENOENT, errno.EMLINK):
                    raise
                return digest
            shared.rename(staged)
        return digest

    def _publish(self, staged: Path, content_id: str) -> None:
        for parent, _, _ in os.walk(staged, topdown=False):
            sync_directory(Path(parent))
        sync_directory(self._blobs)
        with crossing(Point.CHECKPOINT):
            try:
                staged.rename(self._contents / content_id)
            except OSError:
                if not self.exists(content_id):
                    raise
            sync_directory(self._contents)

    @contextmanager
    def _stage(self) -> Iterator[Path]:
        """A directory of our own, locked while it is used so that nobody sweeps it."""
        while True:
            stage = Path(tempfile.mkdtemp(dir=self._staging))
            try:
                descriptor = os.open(stage, os.O_RDONLY)
            except FileNotFoundError:  # swept already
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if stage.exists():  # else it was swept before it was locked
                break
            os.close(descriptor)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            os.close(descriptor)

    def _sweep(self) -> None:
        for stage in list(self._staging.iterdir()):
            try:
                descriptor = os.open(stage, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stage, ignore_errors=True)
            except BlockingIOError:
                pass  # in use
            finally:
                os.close(descriptor)


def contents_of(root: Path) -> Path:
    """Where the contents of a store at `root` are, each under its id. Creates nothing."""
    return root / "contents"


def verify_content(directory: Path) -> None:
    """Read a content's files again. Raises StorageError when they do not hash to the name of their directory."""
    try:
        hashes = {name: _hash_file(directory / name) for name in _regular_files(directory)}
    except (OSError, ValueError) as error:
        raise StorageError(f"content {directory.name} cannot be read: {error}") from error
    if _content_id(hashes) != directory.name:
        raise StorageError(f"content {directory.name} is damaged: its files are not those that were stored")


def _regular_files(directory: Path) -> list[str]:
    """Relative names, sorted, with forward slashes."""
    names = []
    for parent, directories, files in os.walk(directory):
        for entry in [*directories, *files]:
            path = Path(parent, entry)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                names.append(path.relative_to(directory).as_posix())
            elif not stat.S_ISDIR(mode):
                raise ValueError(f"{path} is not a regular file: links and special files cannot be stored")
    if not names:
        raise ValueError(f"{directory} has no files")
    return sorted(names)


def _content_id(hashes: dict[str, str]) -> str:
    """One hash over the sorted names and the hashes of their files."""
    manifest = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(manifest.encode("utf-8", "surrogateescape")).hexdigest()


def _copy_file(source: Path, target: Path) -> str:
    """Copy durably, and return the SHA-256 of the bytes that were written."""
    digest = hashlib.sha256()
    with (
        open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as reader,
        target.open("xb", buffering=0) as writer,
    ):
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            _write_all(writer.fileno(), chunk)
        os.fchmod(writer.fileno(), 0o444)
        os.fsync(writer.fileno())
    return digest.hexdigest()


def _write_all(descriptor: int, chunk: bytes) -> None:
    remaining = memoryview(chunk)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def _hash_file(path: Path) -> str:
    with path.open("rb") as reader:
        return hashlib.file_digest(reader, "sha256").hexdigest()
