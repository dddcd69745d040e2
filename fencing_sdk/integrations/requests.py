"""
The holder's side for requests.

    for scheme in ("https://", "http://"):
        session.mount(scheme, FencingAdapter(origins=["https://seats.example"]))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlsplit

from fencing_sdk._values.drivers import imported_from

with imported_from(None, "requests"):
    from requests import PreparedRequest, Response
    from requests.adapters import BaseAdapter, HTTPAdapter

from fencing_sdk.integrations._outgoing import Headers, Origin, Outgoing
from fencing_sdk.integrations._problem import may_be_stale, raise_if_stale

__all__ = ["FencingAdapter", "raise_for_stale"]


class FencingAdapter(BaseAdapter):
    """
    Sends the token of the current lease to *origins*, and to no other server. Mount it for ``https://`` and ``http://``.

    A session asks the adapter of the URL for every hop of a redirect. *origins*, *name* and *required*, what happens to
    a header that you set yourself, and what a request raises are as for `fencing_sdk.integrations.httpx.fencing_hook`.
    Where the adapter is not mounted, it takes nothing away: a header that you set goes along, and the token of the
    lease does not.

    Args:
        adapter: What sends. An ``HTTPAdapter`` by default.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        origins: Iterable[str],
        *,
        name: str | None = None,
        required: bool = False,
        adapter: BaseAdapter | None = None,
    ) -> None:
        super().__init__()
        self._outgoing = Outgoing(origins, name=name, required=required)
        self._adapter = HTTPAdapter() if adapter is None else adapter

    def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
        """Send *request*, with or without the token."""
        request = request.copy()  # a redirect copies the headers of the other one, and may go to another adapter
        url = urlsplit(request.url or "")
        self._outgoing.carry(Origin.of(str(url.scheme), str(url.hostname), url.port), cast("Headers", request.headers))
        return self._adapter.send(request, *args, **options)

    def close(self) -> None:
        """Close what sends."""
        self._adapter.close()


def raise_for_stale(response: Response) -> None:
    """
    Raise `StaleTokenError` if *response* is the refusal of a guarded service.

    Call it before ``raise_for_status()``. It trusts the server that answered: use it for your own services.

    Raises:
        StaleTokenError: the token of this request was refused. Never retry it.
    """
    if may_be_stale(response.status_code, response.headers.get("Content-Type", "")):
        headers, path = cast("Headers", response.request.headers), urlsplit(str(response.request.url)).path
        raise_if_stale(response.status_code, response.content, headers=headers, path=path)
