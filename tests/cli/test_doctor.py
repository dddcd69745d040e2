"""`fencing doctor`, as a person uses it: what it prints, its exit codes, and its JSON."""

import json
import os
import pty
import xml.etree.ElementTree as ET

import pytest
from command_line import Fencing
from redis_server import RedisServer

pytest_plugins = ["etcd_fixtures", "kahuna_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

BUSY = ("machine.", "store.latency")


def quiet(text: str) -> bool:
    """Whether the machine was not too busy for its own measurements."""
    return not any(check in text for check in BUSY)


@pytest.fixture
def url(fencing: Fencing) -> str:
    return f"sqlite:///{fencing.folder}/locks.db?synchronous=normal"


def test_a_sound_store_is_reported_on_80_columns_without_colours(fencing: Fencing, url: str):
    done = fencing("doctor", "--for", "300ms", "--url", url)
    assert done.stderr == ""
    assert done.returncode == 0 or not quiet(done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    for line in ("longest pause", "sqlite.synchronous", "> leave synchronous out", "1 note", "heartbeat_interval"):
        assert line in done.stdout


def test_an_error_has_exit_code_1_and_a_warning_3(fencing: Fencing, tmp_path):
    down = fencing("doctor", "--for", "0", "--url", "redis://:hunter2@127.0.0.1:1")
    assert (down.returncode, down.stderr) == (1, "")
    assert "store.reachable" in down.stdout
    assert "Traceback" not in down.stdout
    assert "hunter2" not in down.stdout
    assert "no renewal was measured" in down.stdout
    assert "slowest renewal" not in down.stdout
    warned = fencing("doctor", "--for", "100ms", "--url", "memory://?tokens=counter")
    assert warned.returncode == 3 or not quiet(warned.stdout)
    assert "memory.tokens" in warned.stdout


def test_without_a_url_the_store_is_the_one_in_which_run_and_ls_keep_locks(fencing: Fencing):
    fencing("run", "nightly/1", "--", "true")
    done = fencing("doctor", "--for", "100ms")
    assert done.stderr == ""
    assert done.returncode == 0 or not quiet(done.stdout)
    assert "sqlite://" in done.stdout


def test_json_has_everything(fencing: Fencing, url: str):
    fencing.environment["FENCING_URL"] = url
    told = json.loads(fencing("doctor", "--for", "200ms", "--json").stdout)
    assert told.keys() == {"findings", "measurements", "advice"}
    (finding,) = [finding for finding in told["findings"] if quiet(finding["check"])]
    assert (finding["check"], finding["severity"]) == ("sqlite.synchronous", "note")
    assert finding.keys() == {"check", "severity", "what", "reason", "mend"}
    assert told["advice"]["ttl"] >= 15
    assert len(told["measurements"]["tokens"]) >= 4  # a lock that is handed on slowly is handed on again


def test_a_terminal_gets_colours(fencing: Fencing, url: str):
    ours, theirs = pty.openpty()
    del fencing.environment["NO_COLOR"]
    fencing.environment |= {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = fencing.start("doctor", "--for", "100ms", "--url", url, stdout=theirs)
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 65536):
            printed += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait()
    assert b"\x1b[" in printed
    assert b"sqlite.synchronous" in printed


def test_the_screen_is_drawn_without_anything_from_elsewhere(fencing: Fencing, url: str):
    fencing("doctor", "--for", "100ms", "--url", url, "--svg", "doctor.svg")
    picture = fencing.path("doctor.svg").read_text()
    assert ET.fromstring(picture).tag.endswith("svg")
    assert "sqlite.synchronous" in picture
    assert "https:" not in picture


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "memory://", "--for", "1 fortnight"), "--for"),
        (("--url", "memory://", "--ttl", "1ms"), "ttl"),
        (("--url", "memory://", "--svg", "none/doctor.svg"), "cannot write"),
        (("--url", "nonsense"), "url must look like"),
    ],
)
def test_wrong_usage_is_told(fencing: Fencing, arguments: tuple[str, ...], message: str):
    done = fencing("doctor", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


STORES = {
    "postgresql_server": "postgresql.fsync",
    "etcd_server": "etcd.members",
    "zookeeper_server": "zookeeper.ensemble",
    "kahuna_server": "kahuna.nodes",
}
"""What is found on the servers of the tests."""


@pytest.mark.parametrize("store", STORES)
def test_every_store_is_diagnosed(fencing: Fencing, request: pytest.FixtureRequest, store: str):
    check_diagnosis(fencing, request.getfixturevalue(store).url, STORES[store])


def test_redis_is_diagnosed(fencing: Fencing, redis_server: RedisServer):
    check_diagnosis(fencing, redis_server.url, "redis.persistence")


def check_diagnosis(fencing: Fencing, url: str, check: str) -> None:
    done = fencing("doctor", "--for", "200ms", "--url", url)
    assert done.stderr == ""
    assert done.returncode in {1, 3}
    assert check in done.stdout
    assert "handed on after" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_store_that_hangs_is_told(fencing: Fencing, redis_server: RedisServer):
    redis_server.pause()
    try:
        done = fencing("doctor", "--for", "1s", "--url", redis_server.url)
    finally:
        redis_server.resume()
    assert (done.returncode, done.stderr) == (1, "")
    assert "store.reachable" in done.stdout
