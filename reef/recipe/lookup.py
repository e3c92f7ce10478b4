"""From the names in a deployment file to objects: built-in ones by name, your own by path (see `reef.named`).

A recipe's is called with the section's config, an evaluator's also with the training runtime; both may be a class or a
function.
"""

from __future__ import annotations

from reef.errors import ConfigError
from reef.named import call, load_callable
from reef.recipe.config import EvaluationConfig, RecipeConfig
from reef.recipe.evaluation import AlwaysEvaluator, HeldOutEvaluator, Scorer, contains, exact, load_prompts
from reef.recipe.record_only import RecordOnlyRecipe
from reef.recipe.scored import ScoredRecipe
from reef.runtime.interfaces import Evaluator, Recipe, TrainingRuntime


def build_recipe(config: RecipeConfig) -> Recipe:
    """Raises ConfigError for an unknown name or a path that does not lead to a recipe."""
    if config.name == "scored":
        return ScoredRecipe(config)
    if config.name == "record-only":
        return RecordOnlyRecipe(config)
    target = load_callable("recipe.name", config.name, "scored or record-only")
    recipe = call("recipe.name", config.name, target, config)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe.name: what {config.name} builds must be a Recipe, got {type(recipe).__name__}")
    return recipe


def build_evaluator(config: EvaluationConfig, runtime: TrainingRuntime | None = None) -> Evaluator:
    """Raises ConfigError for an unknown name, a path that leads to no evaluator, or unreadable held-out prompts."""
    if config.plugin == "always":
        return AlwaysEvaluator()
    if config.plugin == "held-out":
        return HeldOutEvaluator(config, load_prompts(config), build_scorer(config.scorer))
    target = load_callable("evaluation.plugin", config.plugin, "always or held-out")
    made = call("evaluation.plugin", config.plugin, target, config, runtime)
    if not isinstance(made, Evaluator):
        raise ConfigError(
            f"evaluation.plugin: what {config.plugin} builds must be an Evaluator, got {type(made).__name__}"
        )
    return made


def build_scorer(name: str) -> Scorer:
    """Raises ConfigError for an unknown name or a path that leads to nothing callable."""
    if name == "exact":
        return exact
    if name == "contains":
        return contains
    return load_callable("evaluation.scorer", name, "exact or contains")
