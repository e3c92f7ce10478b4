"""One answer of a provider, which another task may abort at any time."""

from __future__ import annotations

from collections.abc import Awaitable

from reef.errors import UpstreamError
from reef.inference.provider.connection import Connection
from reef.inference.provider.stream import check_json
from reef.runtime.interfaces import Ending

Headers = list[tuple[bytes, bytes]]


class Reply:
    """The provider's answer while it comes. `close` it always."""

    def __init__(self) -> None:
        self.ending: Ending | None = None  # once it was aborted
        self._connection: Connection | None = None

    async def begin(self, sending: Awaitable[Connection]) -> tuple[int, Headers]:
        """Status and headers. Raises what kept the provider from answering."""
        self._connection = await sending
        if self.ending is not None:
            self.abort(self.ending)
        status, headers = await self._connection.head()
        if 300 <= status < 400:
            raise UpstreamError(f"the provider redirects (status {status}): set inference.upstream-url to where it is")
        return status, headers

    def read(self) -> Awaitable[bytes]:
        """What has come of the rest; empty at its end."""
        assert self._connection is not None
        return self._connection.read()

    async def whole(self, status: int, headers: Headers) -> bytes:
        """The rest. Raises UpstreamError for what is not JSON, but for errors: those are passed on as they are."""
        assert self._connection is not None
        body = await self._connection.read_all()
        if status < 400:
            encoding = next((value for name, value in headers if name == b"content-encoding"), b"identity")
            if encoding != b"identity":
                raise UpstreamError(f"the provider's answer is encoded ({encoding.decode('latin-1')}) against our wish")
            try:
                check_json(body)
            except ValueError as error:
                raise UpstreamError(f"the provider's answer is not JSON: {error}") from error
        return body

    def abort(self, ending: Ending) -> None:
        """End it now, in this way. Never blocks."""
        self.ending = self.ending or ending
        if self._connection is not None:
            self._connection.fail(UpstreamError("the server is shutting down"))

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.release()
