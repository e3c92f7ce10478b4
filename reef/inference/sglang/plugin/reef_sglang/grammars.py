"""A grammar that turns out too complex in mid-answer must not end its request as if the answer were complete.

llguidance then lets only end tokens through, and SGLang does not look whether that was an error.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


def give_up(req: Any, *_: Any, **__: Any) -> None:
    """Before `Req.update_finish_state`, which ends a request for what is in `to_finish` first."""
    matcher = getattr(req.grammar, "ll_matcher", None)
    if matcher is None or req.to_finish is not None or not matcher.is_error():
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = matcher.get_error().partition("\n")[0]
    req.to_finish = FINISH_ABORT(f"the grammar cannot go on: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR)
