from __future__ import annotations

import math

import msgspec
import pytest

from reef.errors import InvalidRequest
from reef.recipe import RecipeConfig, build_recipe
from tests.recipe.exchanges import report

SCORED = build_recipe(RecipeConfig())


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"score": math.nan}, "score", "score must be finite, got nan"),
        ({"score": -math.inf}, "score", "score must be finite, got -inf"),
        ({"score": True}, "score", "score must be a number, got True"),
        ({"score": "good"}, "score", "score must be a number, got 'good'"),
        ({"score": 1e10}, "score", "score must be between -1e+09 and 1e+09, got 10000000000.0"),
        ({"score": 10**400}, "score", "score must be between"),
        ({"score": 1.0, "error": "too"}, "score", "score and error exclude one another"),
        ({"score": 1.0, "group": 3}, "metadata.group", "metadata.group must be a non-empty string, got 3"),
        ({"score": 1.0, "group": ""}, "metadata.group", "metadata.group must be a non-empty string, got ''"),
        ({"group": "g", "group_size": 1}, "metadata.group_size", "metadata.group_size must be >= 2, got 1"),
        ({"group": "g", "group_size": 2.0}, "metadata.group_size", "metadata.group_size must be an integer, got 2.0"),
        ({"group": "g", "group_size": True}, "metadata.group_size", "must be an integer, got True"),
        ({"group_size": 2}, "metadata.group_size", "metadata.group_size needs metadata.group"),
        ({"choice": -1}, "metadata.choice", "metadata.choice must be >= 0, got -1"),
        ({"choice": "0"}, "metadata.choice", "metadata.choice must be an integer, got '0'"),
    ],
)
def test_bad_field_is_named(fields, field, message) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SCORED.validate_report(report("report", "r", **fields))
    assert caught.value.field == field
    assert message in str(caught.value)


def test_report_without_references_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SCORED.validate_report(report("report", score=1.0))
    assert caught.value.field == "references"


@pytest.mark.parametrize(
    "fields",
    [
        {"score": 0},
        {"score": -1.5, "group": "g", "group_size": 2, "choice": 0},
        {"error": "judge timed out"},
        {"colour": "other metadata is the client's own"},
        {},
    ],
)
def test_good_reports_pass(fields) -> None:
    SCORED.validate_report(report("report", "r", **fields))


def test_record_only_takes_any_report() -> None:
    recipe = build_recipe(RecipeConfig(name="record-only"))
    recipe.validate_report(report("report", score=math.nan, group=7))
    assert recipe.processor({}) is None
    assert recipe.contract()["trains"] is False


def test_contract_is_json_and_carries_the_configured_numbers() -> None:
    config = RecipeConfig(batch_size=7, max_staleness=3, group_wait=9.0, min_age=2.0, train_on_length=False)
    contract = msgspec.json.decode(msgspec.json.encode(build_recipe(config).contract()))
    assert contract["batch"]["size"] == 7
    assert contract["groups"]["wait_seconds"] == 9.0
    assert contract["eligibility"]["min_age_seconds"] == 2.0
    assert "answers more than 3 publications older than the head" in contract["eligibility"]["never_trains"]
    assert "answers that the token budget cut" in contract["eligibility"]["never_trains"]
    assert contract["report"]["properties"]["metadata"]["properties"]["group_size"]["minimum"] == 2


def test_scored_report_is_valid_by_its_own_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = SCORED.contract()["report"]
    body = {"references": ["r"], "score": 1.0, "metadata": {"group": "g", "group_size": 2}}
    jsonschema.validate(body, schema)
    for wrong in ({**body, "error": "x"}, {**body, "score": "1"}, {**body, "metadata": {"group_size": 2}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
