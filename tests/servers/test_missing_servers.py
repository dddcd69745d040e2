"""A machine without the servers says what to install, and in CI their absence is a failure."""

from pathlib import Path

import pytest
from etcd_fixtures import require_etcd
from redis_fixtures import require
from zookeeper_server import require_zookeeper


def test_elsewhere_a_missing_server_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install redis-server"):
        require("no-such-server")


def test_in_ci_a_missing_server_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-server is missing"):
        require("no-such-server")


def test_elsewhere_a_missing_etcd_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install etcd-server"):
        require_etcd("no-such-etcd")


def test_in_ci_a_missing_etcd_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-etcd is missing"):
        require_etcd("no-such-etcd")


def test_elsewhere_a_missing_zookeeper_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install zookeeper"):
        require_zookeeper(Path("no-such.jar"))


def test_in_ci_a_missing_zookeeper_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"no-such\.jar or java is missing"):
        require_zookeeper(Path("no-such.jar"))
