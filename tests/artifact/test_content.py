from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.artifact.content import DirectoryContentStore, verify_content
from reef.errors import NotFound, StorageError
from tests.conftest import examples


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> DirectoryContentStore:
    return DirectoryContentStore(root)


def directory(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {found.relative_to(path).as_posix(): found.read_bytes() for found in path.rglob("*") if found.is_file()}


WEIGHTS = {"weights.bin": b"w" * 1000, "config.json": b"{}", "nested/deep/state.bin": b"", "weights 2.bin": b"w" * 1000}


def test_put_and_read_back(store, tmp_path):
    content_id = store.put(directory(tmp_path / "in", WEIGHTS))
    assert store.exists(content_id)
    assert files_of(store.path(content_id)) == WEIGHTS
    verify_content(store.path(content_id))


def test_the_source_may_change_or_go(store, tmp_path):
    source = directory(tmp_path / "in", WEIGHTS)
    content_id = store.put(source)
    for path in source.rglob("*.bin"):
        path.write_bytes(b"changed")
    assert files_of(store.path(content_id)) == WEIGHTS


def test_same_bytes_are_stored_once(store, root, tmp_path):
    one = store.put(directory(tmp_path / "one", WEIGHTS))
    assert store.put(directory(tmp_path / "again", dict(reversed(WEIGHTS.items())))) == one
    two = store.put(directory(tmp_path / "two", {**WEIGHTS, "extra.bin": b"x"}))
    assert two != one
    assert len(list((root / "blobs").iterdir())) == 4
    inodes = {(store.path(content) / name).stat().st_ino for content in (one, two) for name in WEIGHTS}
    assert len(inodes) == 3
    assert list((root / "staging").iterdir()) == []


def test_names_are_part_of_the_content(store, tmp_path):
    contents = [{"a": b"1", "b": b"2"}, {"a": b"2", "b": b"1"}, {"a": b"1", "c": b"2"}, {"d/a": b"1", "b": b"2"}]
    ids = {store.put(directory(tmp_path / str(n), content)) for n, content in enumerate(contents)}
    assert len(ids) == len(contents)


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)


@settings(max_examples=examples(30))
@given(st.dictionaries(names, st.binary(max_size=20), min_size=1, max_size=4))
def test_any_names_and_bytes_round_trip(tmp_path_factory, content):
    scratch = tmp_path_factory.mktemp("any")
    store = DirectoryContentStore(scratch / "store")
    content_id = store.put(directory(scratch / "in", content))
    assert files_of(store.path(content_id)) == content


def test_files_are_read_only(store, tmp_path):
    content_id = store.put(directory(tmp_path / "in", WEIGHTS))
    assert {path.stat().st_mode & 0o777 for path in store.path(content_id).rglob("*.bin")} == {0o444}


@pytest.mark.parametrize("content_id", ["", "missing", "..", "../blobs", "a" * 64, "A" * 64])
def test_unknown_contents(store, content_id):
    assert not store.exists(content_id)
    with pytest.raises(NotFound):
        store.path(content_id)


@pytest.mark.parametrize("kind", ["file link", "directory link", "fifo", "empty"])
def test_what_cannot_be_stored_is_refused(store, root, tmp_path, kind):
    source = tmp_path / "in"
    source.mkdir()
    if kind != "empty":
        directory(source, WEIGHTS)
    if kind == "file link":
        (source / "odd").symlink_to(source / "weights.bin")
    elif kind == "directory link":
        (source / "odd").symlink_to(source / "nested")
    elif kind == "fifo":
        os.mkfifo(source / "odd")
    with pytest.raises(ValueError, match=r"odd is not a regular file|has no files"):
        store.put(source)
    assert files_of(root) == {}


def test_a_full_disk_stores_nothing(store, root, tmp_path):
    source = directory(tmp_path / "in", {"a": b"small", "weights.bin": bytes(200_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match="could not be stored"):
            store.put(source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((root / "contents").iterdir()) == list((root / "staging").iterdir()) == []
    verify_content(store.path(store.put(source)))


def test_retain_frees_the_rest(store, root, tmp_path):
    kept = store.put(directory(tmp_path / "kept", {"shared": b"s" * 100, "own": b"k"}))
    gone = store.put(directory(tmp_path / "gone", {"shared": b"s" * 100, "other": b"g" * 50}))
    assert store.retain({kept, "unknown"}) == 50
    assert (store.exists(kept), store.exists(gone)) == (True, False)
    verify_content(store.path(kept))
    assert store.retain({kept}) == 0
    assert store.retain(set()) == 101
    assert list((root / "blobs").iterdir()) == []


def test_verify_notices_changed_bytes(store, tmp_path):
    content_id = store.put(directory(tmp_path / "in", WEIGHTS))
    weights = store.path(content_id) / "weights.bin"
    weights.chmod(0o644)
    weights.write_bytes(b"w" * 999 + b"v")
    with pytest.raises(StorageError, match="damaged"):
        verify_content(store.path(content_id))


def test_concurrent_puts_of_the_same_and_other_contents(store, tmp_path):
    contents = [{"shared": bytes(100_000), "own": str(number % 4).encode()} for number in range(24)]
    sources = [directory(tmp_path / str(number), content) for number, content in enumerate(contents)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(store.put, sources))
    assert len(set(ids)) == 4
    for content_id in set(ids):
        verify_content(store.path(content_id))


def test_puts_and_retain_together(store, tmp_path):
    """A content that nobody retains may go at once, but never in part."""
    stop = threading.Event()

    def collect():
        while not stop.is_set():
            store.retain(set())

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for number in range(60):
            content_id = store.put(directory(tmp_path / str(number), WEIGHTS))
            try:
                verify_content(store.path(content_id))
            except (NotFound, StorageError, OSError, ValueError):
                assert not store.exists(content_id)  # it went while it was read
    finally:
        stop.set()
        collector.join(10)
    verify_content(store.path(store.put(tmp_path / "0")))


def test_opening_sweeps_leftovers_but_not_work_in_progress(store, root, tmp_path):
    (root / "staging" / "crashed" / "content").mkdir(parents=True)
    (root / "staging" / "crashed" / "content" / "half").write_bytes(b"h")
    with store._stage() as busy:
        DirectoryContentStore(root)
        assert list((root / "staging").iterdir()) == [busy]


def test_sigkill_leaves_whole_contents_only(root, tmp_path):
    rng = random.Random(0)
    stored: set[str] = set()
    for attempt in range(5):
        command = [sys.executable, "-m", "tests.artifact.putter", str(root), str(tmp_path / "in"), f"seed{attempt}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            lines = process.stdout.readline()
            time.sleep(0.05 + 0.2 * rng.random())
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.read()
        stored |= {line for line in lines.splitlines() if len(line) == 64}
        store = DirectoryContentStore(root)
        contents = {path.name for path in (root / "contents").iterdir()}
        assert stored <= contents
        assert list((root / "staging").iterdir()) == []
        for content_id in contents:
            verify_content(store.path(content_id))
    assert len(stored) >= 5
    store.retain(stored)
    assert {path.name for path in (root / "contents").iterdir()} == stored
