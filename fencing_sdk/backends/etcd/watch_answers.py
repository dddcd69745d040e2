"""
What an answer of a watch says. No I/O happens here.

An answer that cannot be read counts neither as a deletion nor as the absence of one: its reader opens a new stream
from the revision at which the last one began, and etcd repeats what has happened since.
"""

from __future__ import annotations

from typing import NamedTuple

from fencing_sdk._etcd.json_codec import Json, decoded, number
from fencing_sdk._http.bodies import UnreadableAnswerError

__all__ = ["KeyDeletion", "WatchAnswer", "read_watch_answer"]


class KeyDeletion(NamedTuple):
    """The deletion of one key, also by the end of its lease."""

    key: bytes
    revision: int


class WatchAnswer(NamedTuple):
    """One answer."""

    watch_id: int
    """The watch of the stream that the answer is about; 0 if this client gave it no id."""
    cancelled: bool
    """Whether etcd has ended the watch."""
    deletions: list[KeyDeletion]
    puts: int = 0
    """How many puts it tells of."""


def read_watch_answer(fields: Json) -> WatchAnswer:
    """
    Read the whole answer before any part of it is used.

    Raises:
        UnreadableAnswerError: a part of it cannot be read.
    """
    cancelled, events = fields.get("canceled", False), fields.get("events", [])
    if not isinstance(cancelled, bool) or not isinstance(events, list):
        msg = "the answer is not one of a watch"
        raise UnreadableAnswerError(msg)
    found = [_deletion(event) for event in events]
    deletions = [deletion for deletion in found if deletion is not None]
    return WatchAnswer(number(fields, "watch_id"), cancelled, deletions, len(found) - len(deletions))


def _deletion(event: object) -> KeyDeletion | None:
    """Read an event; None: it is a put."""
    kind = event.get("type", "PUT") if isinstance(event, dict) else None
    if kind == "PUT":
        return None
    kv = event.get("kv") if isinstance(event, dict) and kind == "DELETE" else None
    if not isinstance(kv, dict):
        msg = "the answer has an event that is neither a put nor a deletion"
        raise UnreadableAnswerError(msg)
    read = KeyDeletion(decoded(kv.get("key")), number(kv, "mod_revision"))
    if not read.key or read.revision <= 0:
        msg = "the answer has a deletion without its key or its revision"
        raise UnreadableAnswerError(msg)
    return read
