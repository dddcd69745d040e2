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


@pytest.mark.parametrize(
    ("ask", "packages"),
    [
        (lambda: fixtures("redis").require("no-such-server"), "redis-server redis-sentinel openssl"),
        (lambda: fixtures("postgresql").require_postgresql(), "postgresql pgbouncer openssl"),
        (lambda: fixtures("etcd").require_etcd("no-such-etcd"), "etcd-server openssl"),
        (
            lambda: importlib.import_module("zookeeper_server").require_zookeeper(Path("no-such.jar")),
            "zookeeper default-jre-headless",
        ),
        (lambda: require_program("no-such-program"), "no-such-program"),
        (lambda: require_program("no-such-cc", "gcc libc6-dev"), "gcc libc6-dev"),
    ],
    ids=["redis", "postgresql", "etcd", "zookeeper", "program", "packages"],
)
@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_program_is_a_skip_and_in_ci_a_failure_and_both_say_what_to_install(
    ask, packages, ci, outcome, monkeypatch, tmp_path
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("FENCING_TEST_POSTGRESQL", str(tmp_path))
    with pytest.raises(outcome, match=f" is missing: RUNLEVEL=1 apt-get install {packages}$"):
        ask()
