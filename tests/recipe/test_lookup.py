from __future__ import annotations

import pytest

from reef.errors import ConfigError
from reef.recipe import EvaluationConfig, RecipeConfig, build_evaluator, build_recipe, build_scorer
from reef.recipe.evaluation import contains, exact
from reef.recipe.record_only import RecordOnlyRecipe
from reef.recipe.scored import ScoredRecipe

EVALUATOR = """
from reef.runtime.interfaces import Decision, Evaluation, Evaluator

class Never(Evaluator):
    def __init__(self, config, runtime):
        self.config, self.runtime = config, runtime

    async def evaluate(self, candidate, sampler):
        return Evaluation()

    def decide(self, candidate, evaluation):
        return Decision(False, self.config.options["why"])

def build(config, runtime):
    return Never(config, runtime)

number = 7
single = lambda config: 7
broken = lambda *arguments: None
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "never_plugin.py").write_text(EVALUATOR)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "never_plugin.py"


def test_built_in_names() -> None:
    assert isinstance(build_recipe(RecipeConfig()), ScoredRecipe)
    assert isinstance(build_recipe(RecipeConfig(name="record-only")), RecordOnlyRecipe)
    assert (build_scorer("exact"), build_scorer("contains")) == (exact, contains)


def test_recipe_by_class_path() -> None:
    assert isinstance(build_recipe(RecipeConfig(name="reef.recipe.scored:ScoredRecipe")), ScoredRecipe)


@pytest.mark.parametrize("form", ["never_plugin:Never", "never_plugin:build", "{file}:Never", "{file}"])
def test_evaluator_by_path(plugin, form) -> None:
    config = EvaluationConfig(plugin=form.format(file=plugin), options={"why": "because"})
    evaluator = build_evaluator(config, None)
    assert evaluator.decide(None, None).reason == "because"


def test_a_file_is_loaded_once(plugin) -> None:
    first = build_evaluator(EvaluationConfig(plugin=f"{plugin}:Never"))
    second = build_evaluator(EvaluationConfig(plugin=f"{plugin}:Never"))
    assert type(first) is type(second)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scord", "recipe.name must be scored or record-only, or package.module:name, got 'scord'"),
        ("no.such:Recipe", "recipe.name: cannot load no.such:Recipe: ModuleNotFoundError"),
        ("reef.recipe.scored:Nothing", "cannot load .*AttributeError"),
        ("gone.py:build", "cannot load .*FileNotFoundError"),
        ("never_plugin:single", "must be a Recipe, got int"),
        ("never_plugin:number", "must be callable, got int"),
        ("reef.recipe.config:RecipeConfig", "RecipeConfig failed: TypeError"),
    ],
)
def test_bad_recipe_path_says_why(plugin, name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe(RecipeConfig(name=name))


def test_bad_evaluator_path_says_why(plugin) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.plugin must be always or held-out"):
        build_evaluator(EvaluationConfig(plugin="sometimes"))
    with pytest.raises(ConfigError, match="must be an Evaluator, got NoneType"):
        build_evaluator(EvaluationConfig(plugin="never_plugin:broken"))
    with pytest.raises(ConfigError, match=r"evaluation\.scorer must be exact or contains"):
        build_scorer("similar")
