"""Every backend that has a store outside the process."""

from __future__ import annotations

from fire_alone import Kahuna, Mysql, Postgresql, Redis, Sqlite
from fire_members import Etcd, RedisQuorum, RedisSentinel, ZooKeeper
from fire_store import Store

STORES: dict[str, type[Store]] = {
    store.name: store
    for store in (Sqlite, Redis, RedisSentinel, RedisQuorum, Postgresql, Mysql, Etcd, ZooKeeper, Kahuna)
}
