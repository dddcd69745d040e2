"""One answer of a member is read: a body, or a line of a stream."""

from __future__ import annotations

import json

from fencing_sdk._etcd.errors import failure_by_code
from fencing_sdk._etcd.json_codec import Json
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome

__all__ = ["BODY_LIMIT", "read_answer"]

BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer: twice what etcd sends at most."""


def read_answer(body: bytes, status: int) -> Json:
    """
    Read one answer. In a stream, its fields stand in ``result``.

    Raises:
        RequestFailedError: the answer is an error, or an HTTP status that another try will not change.
        UnreadableAnswerError: it is not an answer of etcd.
    """
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        if 300 <= status < 500:  # noqa: PLR2004
            msg = f"HTTP {status}; is this the client port of an etcd 3.4 or newer? With TLS, write etcd+https://"
            raise RequestFailedError(RequestOutcome.REJECTED, msg)
        msg = "the answer is not a JSON object" if status == 200 else f"HTTP {status}"  # noqa: PLR2004
        raise UnreadableAnswerError(msg)
    error = fields.get("error")
    detail = error if isinstance(error, dict) else fields
    code = detail.get("code", detail.get("grpc_code"))
    if error is not None or status != 200:  # noqa: PLR2004
        raise failure_by_code(code if isinstance(code, int) else 0, status, str(detail.get("message", "")))
    result = fields.get("result", fields)
    return result if isinstance(result, dict) else {}
