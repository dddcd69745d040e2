"""The servers that the tests start are what they say, and leave nothing behind."""

import pytest
from etcd_server import EtcdCluster, EtcdError, StartEtcd, b64
from patience import wait_until

pytest_plugins = ["etcd_fixtures"]


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
