"""Servers that are missing, ports that are taken, and the benches of etcd and ZooKeeper."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, EtcdError, StartEtcd, b64
from local_ports import PORTS, REMEMBERED, Reservations, free_port
from patience import wait_until
from required_program import require_program

pytest_plugins = ["etcd_fixtures", "zookeeper_fixtures"]


# A machine without the servers says what to install, and in CI their absence is a failure.


def fixtures(of: str):
    """Their module, imported late: pytest wants to be the first who imports a plugin."""
    return importlib.import_module(f"{of}_fixtures")


@pytest.mark.parametrize("command", [["redis-server", "--version"], ["setpriv", "/usr/sbin/mariadbd"], ["openssl"]])
def test_a_test_that_starts_a_server_without_asking_for_it_fails(command, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        subprocess.run(command)
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        importlib.import_module("child_processes").spawn([*command], folder=tmp_path, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("ask", "packages"),
    [
        (lambda: fixtures("redis").require("no-such-server"), "redis-server redis-sentinel openssl"),
        (lambda: fixtures("postgresql").require_postgresql(), "postgresql pgbouncer openssl"),
        (lambda: fixtures("mysql").require_mysql("mariadb"), "mariadb-server-core mariadb-client-core openssl"),
        (lambda: fixtures("mysql").require_mysql("mysql"), "mysql-server-core openssl"),
        (lambda: fixtures("etcd").require_etcd("no-such-etcd"), "etcd-server openssl"),
        (
            lambda: importlib.import_module("zookeeper_server").require_zookeeper(Path("no-such.jar")),
            "zookeeper default-jre-headless",
        ),
        (lambda: require_program("no-such-program"), "no-such-program"),
        (lambda: require_program("no-such-cc", "gcc libc6-dev"), "gcc libc6-dev"),
    ],
    ids=["redis", "postgresql", "mariadb", "mysql", "etcd", "zookeeper", "program", "packages"],
)
@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_program_is_a_skip_and_in_ci_a_failure_and_both_say_what_to_install(
    ask, packages, ci, outcome, monkeypatch, tmp_path
):
    monkeypatch.setenv("CI", ci)
    for server in ("POSTGRESQL", "MARIADB", "MYSQL"):
        monkeypatch.setenv(f"FENCING_TEST_{server}", str(tmp_path / "missing"))
    with pytest.raises(outcome, match=f" is missing: RUNLEVEL=1 apt-get install {packages}$"):
        ask()


# Ports: reserved against every other process that runs the tests.


TAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from local_ports import Reservations
reservations = Reservations(Path(sys.argv[2]))
print([reservations.take(int(port)) for port in sys.argv[3:]])
"""


def taken_elsewhere(path: Path, *ports: int) -> str:
    """What another process is told that asks for these ports."""
    command = [sys.executable, "-c", TAKE, str(Path(__file__).parent), str(path), *map(str, ports)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_port_is_given_out_once_even_if_nothing_listens_on_it():
    assert len({free_port() for _ in range(100)}) == 100


def test_other_processes_cannot_take_a_reserved_port(tmp_path: Path, request: pytest.FixtureRequest):
    path = tmp_path / "ports"
    reservations = Reservations(path)
    request.addfinalizer(reservations.close)
    assert reservations.take(11_000)
    assert not reservations.take(11_000)
    assert taken_elsewhere(path, 11_000, 11_001) == "[False, True]"
    assert reservations.take(11_001), "a process that has ended keeps no port"


def test_the_oldest_ports_are_given_back(tmp_path: Path, request: pytest.FixtureRequest):
    path = tmp_path / "ports"
    reservations = Reservations(path)
    request.addfinalizer(reservations.close)
    assert all(reservations.take(port) for port in PORTS[: REMEMBERED + 1])
    assert taken_elsewhere(path, PORTS[0], PORTS[1]) == "[True, False]"


# The servers that the tests start are what they say, and leave nothing behind.


def test_a_server_keeps_its_data_through_a_kill(start_etcd: StartEtcd):
    server = start_etcd()
    server.ask("kv/put", {"key": b64("fencing/a/b"), "value": b64("x")})
    server.kill()
    assert server.running == []
    server.start()
    assert list(server.keys()) == ["fencing/a/b"]
    server.clear()
    assert server.keys() == {}


def test_an_error_is_not_taken_for_an_answer(etcd_server: EtcdCluster):
    with pytest.raises(EtcdError, match="404"):
        etcd_server.ask("kv/nonsense")


def test_a_cluster_has_one_leader_and_outlives_it(etcd_cluster: EtcdCluster):
    leader = etcd_cluster.leader()
    wait_until(lambda: [member for member in etcd_cluster.members if member.leads()] == [leader], what="it leads alone")
    leader.kill()
    assert etcd_cluster.leader() is not leader
    etcd_cluster.heal()
    assert len(etcd_cluster.running) == 3


def test_a_member_that_is_cut_off_runs_and_is_of_no_use_until_the_network_heals(partitioned_etcd: EtcdCluster):
    leader, network = partitioned_etcd.leader(), partitioned_etcd.network
    assert network is not None
    with network.isolated(leader.address):
        wait_until(lambda: not leader.leads(), what="the leader knows that it has no followers")
        assert not leader.ready()
        assert partitioned_etcd.leader() is not leader
    wait_until(leader.ready, what="it is back")


def test_a_closed_cluster_leaves_no_process_and_no_folder(etcd_binary: str):
    with EtcdCluster() as server:
        assert server.folder.exists()
    assert server.running == []
    assert not server.folder.exists()


# The bench itself: a ZooKeeper that is up answers, and one that was harmed shows it.


def test_a_server_answers_and_knows_that_it_is_alone(zookeeper_server):
    assert zookeeper_server.say("ruok", patience=20) == "imok"
    assert zookeeper_server.role(patience=20) == "standalone"


def test_a_killed_server_is_silent_and_comes_back_on_its_port(start_zookeeper):
    server = start_zookeeper()
    port, pid = server.port, server.pid
    server.kill()
    assert server.role() == ""
    server.start()
    assert (server.port, server.role(patience=20)) == (port, "standalone")
    assert server.pid != pid


def test_a_paused_server_does_not_answer(start_zookeeper):
    server = start_zookeeper()
    server.pause()
    assert server.say("ruok", patience=0.2) == ""
    server.resume()
    assert server.say("ruok", patience=20) == "imok"


def test_settings_reach_the_server(start_zookeeper):
    assert "maxSessionTimeout=9000" in start_zookeeper(settings=["maxSessionTimeout=9000"]).say("conf")


def test_an_ensemble_has_one_leader_and_another_one_when_that_dies(zookeeper_ensemble):
    leader = zookeeper_ensemble.leader
    wait_until(lambda: [member.role(patience=20) for member in zookeeper_ensemble.followers] == ["follower"] * 2)
    leader.kill()
    assert zookeeper_ensemble.leader is not leader
    zookeeper_ensemble.heal()
    wait_until(lambda: leader.role(patience=20) == "follower")
