"""
What a watch of etcd tells. No I/O happens here.

An answer that is not understood is no deletion, and not the absence of one: whoever reads it begins
the stream anew, where the last one began, and is told again of whatever has happened since.
"""

from __future__ import annotations

from typing import NamedTuple

from fencing_sdk._etcd.json_codec import Json, UnreadableError, decoded, number

__all__ = ["Deletion", "Told", "told"]


class Deletion(NamedTuple):
    key: bytes
    revision: int


class Told(NamedTuple):
    """One answer."""

    watch: int
    """Which watch of the stream it is about; 0 when it had no number of ours."""
    cancelled: bool
    """Whether etcd has ended the watch."""
    deletions: list[Deletion]


def told(fields: Json) -> Told:
    """
    Read one answer, to its end before anything is made of it.

    Raises:
        UnreadableError: a part of it is not what etcd says.
    """
    cancelled, events = fields.get("canceled", False), fields.get("events", [])
    if not isinstance(cancelled, bool) or not isinstance(events, list):
        msg = "the answer is none of a watch"
        raise UnreadableError(msg)
    found = [_deletion(event) for event in events]
    return Told(number(fields, "watch_id"), cancelled, [deletion for deletion in found if deletion is not None])


def _deletion(event: object) -> Deletion | None:
    """The deletion that an event is; None: it is a put."""
    kind = event.get("type", "PUT") if isinstance(event, dict) else None
    if kind == "PUT":
        return None
    kv = event.get("kv") if isinstance(event, dict) and kind == "DELETE" else None
    if not isinstance(kv, dict):
        msg = "the answer has an event that is neither a put nor a deletion"
        raise UnreadableError(msg)
    read = Deletion(decoded(kv.get("key")), number(kv, "mod_revision"))
    if not read.key or read.revision <= 0:
        msg = "the answer has a deletion without its key or its revision"
        raise UnreadableError(msg)
    return read
