"""Objectives: pure functions from the trained tokens to a scalar loss, looked up by the name that a recipe gives."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch import Tensor

from reef.runtime.interfaces import Objective
from reef.train.objectives import cross_entropy, kl, policy_gradient
from reef.train.objectives.tokens import ObjectiveParams, TokenBatch, token_weights

__all__ = ["LossFunction", "ObjectiveParams", "TokenBatch", "lookup", "token_weights"]

P = TypeVar("P", bound=ObjectiveParams)


@dataclass(slots=True, frozen=True)
class LossFunction:
    """An objective with its validated parameters. Calling it gives the loss and the objective's own metrics."""

    params: ObjectiveParams
    compute: Callable[[TokenBatch], tuple[Tensor, dict[str, float]]]

    def __call__(self, tokens: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        return self.compute(tokens)


def lookup(objective: Objective) -> LossFunction:
    """Find the function and check its parameters. Raises ValueError naming what is unknown or out of bounds."""
    if objective.name == "policy_gradient":
        return _bind(objective, policy_gradient.Params, policy_gradient.loss)
    if objective.name == "cross_entropy":
        return _bind(objective, cross_entropy.Params, cross_entropy.loss)
    if objective.name == "kl":
        return _bind(objective, kl.Params, kl.loss)
    raise ValueError(f"unknown objective {objective.name!r}; known: policy_gradient, cross_entropy, kl")


def _bind(
    objective: Objective, kind: type[P], function: Callable[[TokenBatch, P], tuple[Tensor, dict[str, float]]]
) -> LossFunction:
    values = {name.replace("-", "_"): value for name, value in objective.params.items()}
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in values:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{objective.name} has no parameter {name!r}; did you mean {nearest!r}?")
    try:
        params = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{objective.name}: {error}") from error
    return LossFunction(params, lambda tokens: function(tokens, params))
