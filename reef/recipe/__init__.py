"""Recipes and evaluation plugins: what trains, and what may serve."""

from reef.recipe.config import EvaluationConfig, RecipeConfig
from reef.recipe.lookup import build_evaluator, build_recipe, build_scorer

__all__ = ["EvaluationConfig", "RecipeConfig", "build_evaluator", "build_recipe", "build_scorer"]
