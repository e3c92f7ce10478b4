"""The page of a real deployment in front of a scripted provider."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest

from tests.service.conftest import Running
from tests.service.providers import FakeProvider, ask, in_front, reply

TOKEN = "planted-token"


class Page(HTMLParser):
    """Its text, and whatever would make a browser fetch or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.foreign = "", []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def handle_starttag(self, tag, attributes) -> None:
        if tag in ("script", "link", "img", "iframe", "form", "b"):
            self.foreign.append(tag)
        self.foreign += [name for name, _ in attributes if name in ("src", "href") or name.startswith("on")]


@pytest.fixture(scope="module")
def reef(tmp_path_factory) -> Iterator[Running]:
    provider = FakeProvider()
    provider.answer = reply({"choices": []})
    with in_front(provider.url, tmp_path_factory.mktemp("reef"), tokens=[TOKEN]) as found:
        found.http.headers["x-api-key"] = TOKEN
        yield found
    provider.close()


def test_it_shows_scenarios_chain_records_and_health(reef: Running):
    receipts = [ask(reef).headers["x-reef-agent-record-id"] for _ in range(2)]
    judged = {"references": receipts[:1], "score": 0.5, "agent_record_id": "verdict"}
    assert reef.http.post("/reef/report", json=judged, headers={"x-reef-scenario": "s"}).status_code == 200
    response = reef.http.get("/dashboard")
    page = Page(response.text)
    assert response.headers["content-type"] == "text/html; charset=utf-8" and page.foreign == []
    assert "default-src 'none'" in response.headers["content-security-policy"]
    lines = page.text.splitlines()
    assert "healthy" in lines and "s" in lines and "trains: this process" in lines
    assert all(receipt in lines for receipt in [*receipts, "verdict"])
    assert f"score 0.5 on {receipts[0]}" in lines and "/v1/chat/completions 200 " in page.text
    assert lines.index("verdict") < lines.index(receipts[1]) < lines.index(receipts[0]), "newest first"
    assert any("serves release 0 (base" in line for line in lines) and TOKEN not in response.text


def test_what_a_client_wrote_is_text(reef: Running):
    receipt = ask(reef).headers["x-reef-agent-record-id"]
    judged = {"references": [receipt], "error": "<b onclick=x>broken</b>"}
    assert reef.http.post("/reef/report", json=judged, headers={"x-reef-scenario": "s"}).status_code == 200
    page = Page(reef.http.get("/dashboard").text)
    assert page.foreign == [] and "<b onclick=x>broken</b> on" in page.text


def test_a_browser_logs_in_with_a_token_and_only_here(reef: Running):
    browser = httpx.Client(base_url=reef.url, timeout=200)
    refused = browser.get("/dashboard")
    asked = 'Basic realm="Reef: the password is a token"'
    assert refused.status_code == 401 and refused.headers.get_list("www-authenticate") == [asked]
    assert browser.get("/dashboard", auth=("me", "wrong")).status_code == 401
    assert browser.get("/dashboard", headers={"authorization": "Basic !!"}).status_code == 401
    assert browser.get("/dashboard", auth=("me", TOKEN)).status_code == 200
    elsewhere = browser.get("/reef/status", auth=("me", TOKEN))
    assert elsewhere.status_code == 401 and elsewhere.headers["www-authenticate"] == "Bearer"
    assert browser.post("/dashboard", auth=("me", TOKEN)).status_code == 401
    assert browser.post("/reef/scenarios/s/update", auth=("me", TOKEN)).status_code == 401
