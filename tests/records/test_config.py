from __future__ import annotations

import msgspec
import pytest

from reef.config import resolve
from reef.errors import ConfigError, StorageError
from reef.records.config import PostgresConfig, SqliteConfig
from reef.records.opening import open_storage, storage_at
from reef.records.sqlite import SqliteStorage

URL = "postgresql://reef:topsecret@db.example/reef"
MODEL = {"inference.model-path": "m"}


def test_defaults_and_hyphenated_keys():
    assert SqliteConfig() == msgspec.convert({"busy-timeout": 10.0, "retention-days": 0.0}, SqliteConfig)


@pytest.mark.parametrize(
    ("kind", "section", "message"),
    [
        (SqliteConfig, {"busy-timeout": 0}, "busy-timeout"),
        (SqliteConfig, {"read-threads": 0}, "read-threads"),
        (SqliteConfig, {"busy_timeout": 1.0}, "unknown field `busy_timeout`"),
        (SqliteConfig, {"retention-days": -1.0}, "retention-days"),
        (SqliteConfig, {"lease-seconds": 0.5}, "lease-seconds"),
        (PostgresConfig, {}, "storage.url is required"),
        (PostgresConfig, {"url": "mysql://reef:topsecret@db/reef"}, "storage.url must be postgresql://"),
        (PostgresConfig, {"url": "host=db password=topsecret"}, "storage.url must be postgresql://"),
        (PostgresConfig, {"url": URL, "schema": "Robert'); DROP"}, "schema"),
        (PostgresConfig, {"url": URL, "schema": "pg_reef"}, "must not start with pg_"),
        (PostgresConfig, {"url": URL, "connections": 0}, "connections"),
    ],
)
def test_wrong_values_are_named_and_passwords_are_not(kind, section, message):
    with pytest.raises(msgspec.ValidationError, match=message) as failure:
        msgspec.convert(section, kind)
    assert "topsecret" not in str(failure.value)


def test_the_url_is_a_secret():
    resolved = resolve(flags={**MODEL, "storage.backend": "postgres", "storage.url": URL})
    assert "topsecret" not in resolved.to_yaml() and "# url: (hidden)" in resolved.to_yaml()


def test_a_url_needs_its_backend():
    with pytest.raises(
        ConfigError, match=r"storage\.url .* needs storage\.backend postgres, but it is sqlite"
    ) as failure:
        resolve(flags={**MODEL, "storage.url": URL})
    assert "topsecret" not in str(failure.value)


def test_a_storage_is_named_by_its_url(tmp_path):
    pytest.importorskip("psycopg")
    found = storage_at(f"sqlite:{tmp_path}/a.db")
    assert isinstance(found, SqliteStorage) and found.database.name == f"{tmp_path}/a.db"
    name = storage_at(f"{URL}?sslmode=disable&schema=two").database.name
    assert name == "PostgreSQL at db.example:5432/reef, schema two"
    assert storage_at(URL).database.name.endswith("schema reef")
    assert isinstance(open_storage(SqliteConfig(), tmp_path), SqliteStorage)


@pytest.mark.parametrize(
    "url", ["sqlite:", "mysql://x", "topsecret", f"{URL}?schema=pg_x", f"{URL}?nonsense=topsecret"]
)
def test_other_urls_are_refused_without_repeating_them(url):
    pytest.importorskip("psycopg")
    with pytest.raises((ConfigError, StorageError)) as failure:
        storage_at(url)
    assert "topsecret" not in str(failure.value)
