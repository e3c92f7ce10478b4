"""Sections `recipe` (how reports become training steps) and `evaluation` (whether a candidate may serve)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class RecipeConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `recipe`. Raises ValueError naming field, bound and value."""

    name: Annotated[
        str, Meta(description='"scored", "record-only", or "package.module:build" of your own', min_length=1)
    ] = "scored"
    batch_size: Annotated[
        int, Meta(description="samples a step waits for; whole reports and groups are added until it is reached", ge=1)
    ] = 32
    max_staleness: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="publications between a sample and the head that trains on it; 0: only the head's own samples, "
            "null: any age"
        ),
    ] = 4
    min_age: Annotated[float, Meta(description="seconds a report waits before it may train", ge=0.0)] = 0.0
    group_wait: Annotated[
        float,
        Meta(
            description="seconds until an unfinished group trains with what it has: after its last report if the group "
            "declared its size, else after its first",
            ge=0.0,
        ),
    ] = 60.0
    advantage: Annotated[
        Literal["group", "leave-one-out"], Meta(description="what a grouped score is compared with")
    ] = "group"
    normalize: Annotated[bool, Meta(description="divide advantages by the standard deviation of the scores")] = False
    baseline_decay: Annotated[
        float, Meta(description="weight that the running baseline keeps for each new report", ge=0.0, lt=1.0)
    ] = 0.95
    score_min: Annotated[float | None, Meta(description="scores below this count as this; null: no bound")] = None
    score_max: Annotated[float | None, Meta(description="scores above this count as this; null: no bound")] = None
    objective: Annotated[str, Meta(description="the trainer's objective", min_length=1)] = "policy_gradient"
    objective_params: Annotated[
        dict[str, float | int | str | bool], Meta(description="parameters of the objective")
    ] = msgspec.field(default_factory=dict)
    train_on_length: Annotated[bool, Meta(description="train on answers that the token budget cut")] = True
    options: Annotated[dict[str, Any], Meta(description="settings of a recipe of your own")] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for field in ("min_age", "group_wait", "score_min", "score_max"):
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"recipe.{field.replace('_', '-')} must be finite, got {value}")
        if self.score_min is not None and self.score_max is not None and self.score_min >= self.score_max:
            raise ValueError(f"recipe.score-min must be < score-max ({self.score_max}), got {self.score_min}")


class EvaluationConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `evaluation`. Raises ValueError naming field, bound and value."""

    plugin: Annotated[
        str, Meta(description='"always", "held-out", or "package.module:build" of your own', min_length=1)
    ] = "always"
    prompts: Annotated[
        str | None,
        Meta(
            description='held-out: JSON lines, each with "messages" or "prompt", and what the scorer gets: "expected"'
        ),
    ] = None
    scorer: Annotated[
        str,
        Meta(description='held-out: "exact", "contains", or "package.module:function" (answer, expected) -> float'),
    ] = "exact"
    margin: Annotated[
        float, Meta(description="held-out: a candidate's mean score may be lower than the incumbent's by this", ge=0.0)
    ] = 0.0
    max_tokens: Annotated[int, Meta(description="held-out: longest answer, in tokens", ge=1)] = 256
    concurrency: Annotated[int, Meta(description="held-out: answers asked for at a time", ge=1)] = 8
    temperature: Annotated[float, Meta(description="held-out: sampling temperature; 0 is greedy", ge=0.0)] = 0.0
    timeout: Annotated[float, Meta(description="held-out: seconds after which the candidate is rejected", gt=0.0)] = (
        600.0
    )
    options: Annotated[dict[str, Any], Meta(description="settings of a plugin of your own")] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for field in ("margin", "temperature", "timeout"):
            if not math.isfinite(value := getattr(self, field)):
                raise ValueError(f"evaluation.{field} must be finite, got {value}")
        if self.plugin == "held-out" and not self.prompts:
            raise ValueError('evaluation.prompts must name a file when evaluation.plugin is "held-out"')
