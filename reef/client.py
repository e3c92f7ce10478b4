"""A small client for a running Reef, on the standard library; the command line speaks through it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from reef.errors import HTTP_STATUS, InvalidRequest, ReefError, Unauthorized, Unavailable

DEFAULT_URL = "http://127.0.0.1:8900"
PAGE = 200


class ReefClient:
    """Calls to one Reef. An error answer is raised as the ReefError of its status, with the server's own message."""

    def __init__(self, url: str = DEFAULT_URL, token: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"not a URL: {url!r}: {error}", "url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"not an http or https URL: {url!r}", "url")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._base = parts.path.rstrip("/")
        self._token = token
        self._timeout = timeout

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of `GET path`; entries of `query` that are None are left out."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return self._call("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The JSON answer of `POST path`. Never sent twice."""
        return self._call("POST", path, json.dumps(body).encode(), headers)

    def scenario_path(self, scenario: str, rest: str) -> str:
        return f"/reef/scenarios/{quote(scenario, safe='')}/{rest}"

    def records(self, scenario: str, **filters: Any) -> Iterator[dict[str, Any]]:
        """Every record of the scenario in order, page by page; `filters` are the route's own, None is left out."""
        after: int | None = 0
        while True:
            page = self.get(self.scenario_path(scenario, "records"), {**filters, "after": after, "limit": PAGE})
            yield from page["records"]
            if (after := page["next_after"]) is None:
                return

    def _call(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        sent = {"accept": "application/json", **(headers or {})}
        if body is not None:
            sent["content-type"] = "application/json"
        if self._token:
            sent["authorization"] = f"Bearer {self._token}"
        try:
            connection.request(method, self._base + path, body, sent)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"no Reef answers at {self.url}: {reason}") from error
        finally:
            connection.close()
        return _decode(response.status, answer, self.url + path)


def _decode(status: int, answer: bytes, url: str) -> Any:
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if status >= 400:
        raise _error(status, document, url)
    if document is None:
        raise ReefError(f"{url} answered {status} without JSON: is it a Reef?")
    return document


def _error(status: int, document: Any, url: str) -> ReefError:
    detail = document.get("error") if isinstance(document, dict) else None
    message = detail.get("message") if isinstance(detail, dict) else detail
    if isinstance(document, dict) and document.get("reasons"):  # of healthz
        message = "; ".join(map(str, document["reasons"]))
    text = str(message or f"{url} answered {status}")
    if status == 401:
        return Unauthorized(f"{text} (give --token or REEF_TOKEN)")
    kind = next((kind for kind, code in HTTP_STATUS if code == status), ReefError)
    return kind(text)
