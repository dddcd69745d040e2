"""A machine without the servers says what to install, and in CI their absence is a failure."""

import importlib
import subprocess
from pathlib import Path

import pytest
from required_program import require_program


def fixtures(of: str):
    """Their module, imported late: pytest wants to be the first who imports a plugin."""
    return importlib.import_module(f"{of}_fixtures")


@pytest.mark.parametrize("command", [["redis-server", "--version"], ["setpriv", "/usr/bin/etcd"], ["openssl"]])
def test_a_test_that_starts_a_server_without_asking_for_it_fails(command, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        subprocess.run(command)
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        importlib.import_module("child_processes").spawn([*command], folder=tmp_path, log=tmp_path / "log")


def test_elsewhere_a_missing_server_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install redis-server"):
        fixtures("redis").require("no-such-server")


def test_in_ci_a_missing_server_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-server is missing"):
        fixtures("redis").require("no-such-server")


def test_elsewhere_a_missing_program_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install no-such-program"):
        require_program("no-such-program")
    with pytest.raises(pytest.skip.Exception, match="no-such-cc is missing: apt-get install gcc libc6-dev"):
        require_program("no-such-cc", "gcc libc6-dev")


def test_in_ci_a_missing_program_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-program is missing"):
        require_program("no-such-program")


def test_elsewhere_a_missing_postgresql_is_a_skip_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("FENCING_TEST_POSTGRESQL", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="apt-get install postgresql"):
        fixtures("postgresql").require_postgresql()


def test_in_ci_a_missing_postgresql_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("FENCING_TEST_POSTGRESQL", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="postgresql is missing"):
        fixtures("postgresql").require_postgresql()


def test_elsewhere_a_missing_etcd_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install etcd-server"):
        fixtures("etcd").require_etcd("no-such-etcd")


def test_in_ci_a_missing_etcd_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-etcd is missing"):
        fixtures("etcd").require_etcd("no-such-etcd")


def test_elsewhere_a_missing_zookeeper_is_a_skip_that_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install zookeeper"):
        importlib.import_module("zookeeper_server").require_zookeeper(Path("no-such.jar"))


def test_in_ci_a_missing_zookeeper_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"no-such\.jar or java is missing"):
        importlib.import_module("zookeeper_server").require_zookeeper(Path("no-such.jar"))
