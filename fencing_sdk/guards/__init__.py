"""
The resource's side: guards that refuse a stale token where the write happens.

    memory.py   MemoryGuard: a resource within this process
    sql/        SqlGuard, FenceColumn: in the caller's own transaction
    redis/      RedisGuard: check and commands in one script
    etcd.py     EtcdGuard: check and operations in one transaction
    kahuna/     KahunaGuard: fence and data in one value, replaced by revision
    files.py    FileGuard: the token in the file name
    _verdict    admitted(): the one decision, for guards of your own too

Nothing here knows locks, leases or backends: a guard meets them in the token alone.
"""

from fencing_sdk.guards._verdict import admitted

__all__ = ["admitted"]
