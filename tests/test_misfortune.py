"""What happens to a data directory besides crashes: a second service, a clock that jumps back, a damaged marker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from crash.misfortune import Shifting, clock_back, damaged_marker, second_service  # noqa: E402
from crash.model import make_model  # noqa: E402


@pytest.fixture(scope="module")
def shifting(tmp_path_factory) -> Iterator[Shifting]:
    directory = tmp_path_factory.mktemp("misfortune")
    with Shifting(make_model(directory / "model"), directory).running() as running:
        yield running


def test_a_second_service_refuses_and_names_the_first(shifting):
    second_service(shifting)


def test_a_clock_that_jumps_back_changes_neither_order_nor_recovery(shifting):
    clock_back(shifting)


def test_a_damaged_marker_stops_the_start_and_says_what_to_do(shifting):
    damaged_marker(shifting)
