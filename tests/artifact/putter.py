"""A process that puts contents until it is killed: `python -m tests.artifact.putter ROOT SOURCE SEED`.

Each line it prints is the id of a content that is stored.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reef.artifact.content import DirectoryContentStore


def put_forever(store: DirectoryContentStore, source: Path, rng: random.Random) -> None:
    while True:
        (source / "nested").mkdir(parents=True)
        (source / "shared.json").write_text("{}")
        (source / "weights.bin").write_bytes(rng.randbytes(rng.randrange(200_000)))
        (source / "nested" / "state.bin").write_bytes(rng.randbytes(rng.randrange(200_000)))
        os.write(1, f"{store.put(source)}\n".encode())
        shutil.rmtree(source)


if __name__ == "__main__":
    root, scratch, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    store = DirectoryContentStore(root)
    with ThreadPoolExecutor(3) as pool:
        works = [
            pool.submit(put_forever, store, scratch / f"{seed}-{worker}", random.Random(f"{seed}-{worker}"))
            for worker in range(3)
        ]
        for work in works:
            work.result()
