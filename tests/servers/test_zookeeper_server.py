"""The bench itself: a ZooKeeper that is up answers, and one that was harmed shows it."""

from __future__ import annotations

from patience import wait_until

pytest_plugins = ["zookeeper_fixtures"]


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
