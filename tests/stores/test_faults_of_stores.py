"""Every store that is a server is ridden out, or a lease ends in time, whatever `FaultsSuite` does to it."""

from faults_suite import FaultsSuite, LostAnswersSuite
from on_stores import OnEtcd, OnKahuna, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnZooKeeper

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class TestRedis(OnRedis, FaultsSuite, LostAnswersSuite): ...


class TestRedisQuorum(OnRedisQuorum, FaultsSuite): ...


class TestPostgresql(OnPostgresql, FaultsSuite, LostAnswersSuite): ...


class TestMysql(OnMysql, FaultsSuite, LostAnswersSuite): ...


class TestEtcd(OnEtcd, FaultsSuite): ...


class TestZooKeeper(OnZooKeeper, FaultsSuite): ...


class TestKahuna(OnKahuna, FaultsSuite): ...
