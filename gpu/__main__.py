"""The command line of `make gpu`: run the cases, print a summary as JSON, keep it in .reef/gpu/report.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

NO_GPU = 3
"""Exit code where torch finds no CUDA device; 1 says that something is wrong."""

SECONDS = 470.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same run without a GPU")
    parser.add_argument("--case", action="append", help="run only this case (may be repeated)")
    parser.add_argument("--report", type=Path, default=Path(".reef/gpu/report.json"))
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"there is no GPU here (torch {torch.__version__} finds no CUDA device): nothing was run", file=sys.stderr
        )
        return NO_GPU
    report = {"device": options.device, "name": _name(options.device), "torch": torch.__version__}
    report |= asyncio.run(_run(options.device, options.case))
    text = json.dumps(report, indent=2)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(text + "\n")
    print(text)
    return 0 if report["passed"] else 1


async def _run(device: str, wanted: list[str] | None) -> dict[str, object]:
    from gpu.case import CASES, run

    began = time.monotonic()
    outcomes = []
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="reef-gpu-") as directory:
            try:
                async with asyncio.timeout(began + SECONDS - time.monotonic()):
                    outcome = await run(case, device, Path(directory))
            except TimeoutError:
                outcomes.append({"name": case.name, "problems": [f"not done {SECONDS:g} s after the run began"]})
                break
        outcomes.append(asdict(outcome))
        print(f"{case.name}: {'; '.join(outcome.problems) or 'ok'}", file=sys.stderr, flush=True)
    passed = bool(outcomes) and not any(outcome["problems"] for outcome in outcomes)
    return {"passed": passed, "seconds": round(time.monotonic() - began, 1), "cases": outcomes}


def _name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
