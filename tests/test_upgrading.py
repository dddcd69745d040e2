"""Each line of the page "Upgrade and roll back" is held by tests, which are named here and are there."""

import re
from pathlib import Path

import pytest

from fencing_sdk.backends.redis.quorum.requests import read_hold

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "upgrading.md").read_text()
RESTORED = "stores/test_restored_backups.py"
HELD_BY = {
    "| memory | nothing |": ["stores/memory/test_memory.py::test_hybrid_tokens_start_at_the_wall_clock"],
    "| SQLite |": [
        "stores/sqlite/test_sqlite_waiters.py::test_a_file_of_the_version_before_is_completed",
    ],
    "| PostgreSQL |": [
        "stores/postgresql/test_postgresql_failover.py::test_a_schema_of_another_version_is_completed_and_keeps_its_locks_and_functions",
    ],
    "| Redis, Sentinel, Cluster |": [
        "stores/redis/test_redis.py::test_the_lease_of_a_client_of_another_version",
        "stores/redis/test_redis.py::test_a_waiter_of_another_version_is_handed_the_lock_by_a_release",
        "stores/redis/test_redis.py::test_a_waiter_of_a_version_that_gives_other_signs_holds_up_no_one",
        "stores/redis/test_redis_refusals.py::test_these_permissions_are_enough_and_all_of_them_are_used",
    ],
    "| etcd, ZooKeeper |": [
        "stores/etcd/test_etcd_joining.py::test_a_field_of_another_version_is_passed_over",
        "stores/zookeeper/test_zookeeper_shares.py::test_a_field_of_another_version_is_passed_over",
    ],
    "| a quorum of Redis, Kahuna, MySQL and MariaDB |": [
        "test_upgrading.py::test_what_a_quorum_stores_has_one_form",
        "stores/kahuna/test_kahuna_requests.py::test_owner_and_label_travel_together_and_come_apart_again",
    ],
    "* `fencing init` may be run again": [
        "cli/test_init.py::test_the_tables_are_created_and_a_second_time_changes_nothing",
        "stores/postgresql/test_postgresql_schema.py::test_many_clients_may_create_the_tables_at_once",
        "stores/postgresql/test_postgresql_failover.py::test_a_schema_of_another_version_is_completed_and_keeps_its_locks_and_functions",
    ],
    "* With `create=false`": [
        "stores/postgresql/test_postgresql_failover.py::test_a_schema_of_another_version_is_completed_and_keeps_its_locks_and_functions",
    ],
    '| SQLite, PostgreSQL, MySQL, Redis with `tokens="hybrid"`': [
        f"{RESTORED}::test_hybrid_tokens_grow_when_a_backup_is_restored"
    ],
    '| SQLite, PostgreSQL, MySQL, Redis with `tokens="counter"`': [
        f"{RESTORED}::test_counters_fall_when_a_backup_is_restored_and_hybrid_tokens_raise_them"
    ],
    "| a quorum of Redis | a server": [
        "stores/quorum/test_redis_quorum_nodes.py::test_a_server_that_restarts_from_an_old_snapshot_does_not_vote",
        "cli/test_init.py::test_a_node_that_has_lost_its_data_is_admitted_again",
    ],
    "| etcd | fall": [f"{RESTORED}::test_numbers_of_the_store_fall_when_a_backup_is_restored"],
    "| ZooKeeper | fall": [f"{RESTORED}::test_numbers_of_the_store_fall_when_a_backup_is_restored"],
    "| memory | there is nothing": ["stores/memory/test_memory.py::test_hybrid_tokens_start_at_the_wall_clock"],
}


def test_each_line_of_the_page_is_held_by_a_test():
    lines = re.findall(r"^(?:\* |\| (?!store |---)).*", PAGE, re.MULTILINE)
    held = {line: [start for start in HELD_BY if line.startswith(start)] for line in lines}
    assert {line: starts for line, starts in held.items() if len(starts) != 1} == {}
    assert {start for starts in held.values() for start in starts} == set(HELD_BY)


@pytest.mark.parametrize("name", sorted({name for names in HELD_BY.values() for name in names}))
def test_the_tests_that_hold_the_page_are_there(name):
    file, _, test = name.partition("::")
    assert f"def {test}" in (ROOT / "tests" / file).read_text()


def test_no_other_page_forbids_what_this_one_allows():
    """A version that breaks it says so in the changelog, as **Breaking**."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "of an earlier version wait" not in changes
    assert "**Breaking**" in PAGE


def test_what_a_quorum_stores_has_one_form():
    seen = read_hold([b"owner\x007\x0034\x002\x00=worker 3", 1500])
    assert (seen.owner, seen.token, seen.left, seen.label, seen.attempt) == ("owner", 34, 1.5, "worker 3", 2)
