"""`python -m reef_sglang.serve ARGS`: SGLang's server with its own arguments, also where torch is a CPU build.

SGLang's child processes import this module again before anything else, and so declare torchvision's operators as well.
"""

from __future__ import annotations

import os
import sys

import reef_sglang.torchvision_operators  # noqa: F401


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
