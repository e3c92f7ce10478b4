from __future__ import annotations

import msgspec
import pytest

from reef.records.config import StorageConfig


def test_defaults_and_hyphenated_keys():
    assert StorageConfig() == msgspec.convert({"backend": "sqlite", "busy-timeout": 10.0}, StorageConfig)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"busy-timeout": 0}, "busy-timeout"),
        ({"read-threads": 0}, "read-threads"),
        ({"backend": "mysql"}, "backend"),
        ({"busy_timeout": 1.0}, "unknown field `busy_timeout`"),
    ],
)
def test_wrong_values_are_named(section, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(section, StorageConfig)
