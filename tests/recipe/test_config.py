from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest

from reef.recipe import EvaluationConfig, RecipeConfig


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (RecipeConfig, {"batch-size": 0}, "`int` >= 1 - at `$.batch-size`"),
        (RecipeConfig, {"max-staleness": -1}, "`int` >= 0 - at `$.max-staleness`"),
        (RecipeConfig, {"advantage": "best"}, "'best' - at `$.advantage`"),
        (RecipeConfig, {"score-min": 1.0, "score-max": 1.0}, "recipe.score-min must be < score-max (1.0), got 1.0"),
        (RecipeConfig, {"group-wait": math.inf}, "recipe.group-wait must be finite, got inf"),
        (RecipeConfig, {"batchsize": 1}, "unknown field `batchsize`"),
        (EvaluationConfig, {"plugin": "held-out"}, "evaluation.prompts must name a file"),
        (EvaluationConfig, {"margin": math.inf}, "evaluation.margin must be finite, got inf"),
        (EvaluationConfig, {"concurrency": 0}, "`int` >= 1 - at `$.concurrency`"),
    ],
)
def test_bad_value_is_refused_by_name(section, values, message) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(values, section)
    assert message in str(caught.value)


def test_keys_are_kebab_case() -> None:
    config = msgspec.convert({"batch-size": 4, "max-staleness": None, "objective-params": {"clip": 0.2}}, RecipeConfig)
    assert (config.batch_size, config.max_staleness, config.objective_params) == (4, None, {"clip": 0.2})


def test_every_key_has_a_description() -> None:
    for section in (RecipeConfig, EvaluationConfig):
        properties = msgspec.json.schema(section)["$defs"][section.__name__]["properties"]
        assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_recipes_load_no_tensor_library() -> None:
    check = "import sys, reef.recipe; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip() == "[]"
