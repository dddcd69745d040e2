"""Which store a command uses: nobody locks a machine for itself by mistake, and a password stays where it was put."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_line import Fencing

from fencing_sdk import ConfigurationError, connect
from fencing_sdk.sync import connect as connect_sync

PROGRAM = f"{sys.executable} -m fencing_sdk"
PAGES = Path(__file__).parent.parent.parent / "docs"
CRON = re.compile(r"^(?:[\d*/,-]+ +){5}.*fencing run", re.MULTILINE)
SECRET = "redis://app:hunter2@locks.example"


@pytest.mark.parametrize(
    "command",
    [
        ("run", "job", "--quiet", "--", "true"),
        ("ls",),
        ("ls", "--json"),
        ("show", "job"),
        ("show", "job", "--json"),
        ("break", "job", "--reason", "it hangs", "--yes"),
        ("doctor", "--for", "100ms"),
    ],
    ids=" ".join,
)
def test_a_command_that_falls_back_to_the_file_of_its_user_names_it_first(fencing: Fencing, command: tuple[str, ...]):
    fencing.environment["FENCING_URL"] = ""  # as an unset variable in a unit of systemd
    done = fencing(*command)
    first, *_ = done.stderr.splitlines()
    assert first.startswith("fencing: no store is named by --url, --url-file, FENCING_URL or FENCING_URL_FILE: ")
    assert first.endswith(f"on this machine alone, in sqlite:///{fencing.state}/fencing/locks.db")
    assert "no store is named" not in done.stdout
    if "--json" in command:
        assert all(json.loads(line) for line in done.stdout.splitlines())
    named = fencing(*command, "--url", first.rpartition(" ")[2]) if command[0] != "run" else None
    assert named is None or "no store is named" not in named.stderr


def test_top_names_the_file_of_its_user_on_its_screen(fencing: Fencing):
    for url, named in (("", False), (f"sqlite:///{fencing.store}", True)):
        fencing.environment["FENCING_URL"] = url
        assert fencing("top", "--svg", "top.svg").returncode == 0
        assert ("FENCING_URL_FILE" in fencing.path("top.svg").read_text()) is not named


def test_every_crontab_of_the_pages_names_a_store():
    blocks = [
        (page.name, block)
        for page in PAGES.rglob("*.md")
        for block in page.read_text().split("```")[1::2]
        if CRON.search(block)
    ]
    assert {"cli.md", "jobs.md"} <= {page for page, _ in blocks}
    assert [page for page, block in blocks if not re.search(r"^FENCING_URL(_FILE)?=", block, re.MULTILINE)] == []


# A file for the URL.


def url_file(fencing: Fencing, content: bytes, mode: int = 0o600) -> str:
    path = fencing.path("url")
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("content", [b"%s", b"%s\n", b"\xef\xbb\xbf%s\r\n\n"], ids=["bare", "a line", "as on Windows"])
def test_a_file_names_the_store(fencing: Fencing, content: bytes):
    url = fencing.environment.pop("FENCING_URL")
    fencing.environment["FENCING_URL_FILE"] = url_file(fencing, content % url.encode())
    for options in ((), ("--url-file", "url")):
        done = fencing("run", "job", *options, "--", "true")
        assert (done.returncode, done.stderr) == (0, "")
        fencing.store.unlink()  # it was there
        fencing.environment.pop("FENCING_URL_FILE", None)


@pytest.mark.parametrize("connecting", [connect, connect_sync])
def test_a_client_finds_the_store_as_a_command_does(
    fencing: Fencing, monkeypatch: pytest.MonkeyPatch, connecting: type
):
    monkeypatch.delenv("FENCING_URL", raising=False)
    monkeypatch.setenv("FENCING_URL_FILE", url_file(fencing, b"nosuch://store"))
    with pytest.raises(ConfigurationError, match="no backend for 'nosuch' URLs"):
        connecting()
    monkeypatch.setenv("FENCING_URL", "memory://")
    with pytest.raises(ConfigurationError, match="FENCING_URL and FENCING_URL_FILE both name a store; unset one"):
        connecting()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (f"{SECRET}\n{SECRET}\n".encode(), "has 2 lines"),
        (SECRET.encode("utf-16"), "is not UTF-8"),
        (None, "cannot be read: Is a directory"),
    ],
)
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
def test_a_file_that_names_no_store_is_an_error_that_repeats_none_of_it(
    fencing: Fencing, content: bytes | None, problem: str, by_option: bool
):
    del fencing.environment["FENCING_URL"]
    path = str(fencing.folder) if content is None else url_file(fencing, content)
    if not by_option:
        fencing.environment["FENCING_URL_FILE"] = path
    done = fencing("ls", *(("--url-file", path) if by_option else ()))
    assert done.returncode == 2
    assert re.match(rf"fencing: {'--url-file' if by_option else 'FENCING_URL_FILE'} '.*' {problem}", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("mode", "url", "warned"),
    [
        (0o644, SECRET, True),
        (0o604, "sqlite:///locks.db?password=hunter2", True),
        (0o640, SECRET, False),
        (0o644, "redis://locks.example", False),
        (0o644, "postgresql://app@locks.example/app", False),
    ],
)
def test_a_password_that_every_user_may_read_is_a_warning(
    fencing: Fencing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    url: str,
    warned: bool,
):
    """No error: the secrets of Kubernetes and of Docker have such modes by default."""
    done = fencing("init", "--sql", "--url-file", url_file(fencing, url.encode(), mode))
    assert ("has a password that every user of this machine may read; run: chmod" in done.stderr) is warned
    monkeypatch.delenv("FENCING_URL", raising=False)
    monkeypatch.setenv("FENCING_URL_FILE", "url")
    monkeypatch.chdir(fencing.folder)
    if "password=" not in url:
        connect()
        assert ("may read" in caplog.text) is warned
    assert "hunter2" not in done.stderr + caplog.text


# What the command learns of it.

ENVIRONMENT = ("--", "env")


def variables(out: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in out.splitlines() if line.startswith("FENCING_"))


def test_the_command_learns_no_url_unless_it_is_asked_for(fencing: Fencing):
    url = fencing.environment["FENCING_URL"]
    path = url_file(fencing, url.encode())
    for options in ((), ("--url", url), ("--url-file", path)):
        found = variables(fencing("run", "job", *options, *ENVIRONMENT).stdout)
        assert not {"FENCING_URL", "FENCING_URL_FILE"} & set(found)
    for options, name, value in (
        ((), "FENCING_URL", url),
        (("--url", url), "FENCING_URL", url),
        (("--url-file", "url"), "FENCING_URL_FILE", path),  # whatever folder it goes to
    ):
        found = variables(fencing("run", "job", "--pass-url", *options, *ENVIRONMENT).stdout)
        assert {key: found[key] for key in found if "URL" in key or "STORE" in key} == {name: value}


def test_a_url_that_came_through_a_pipe_is_passed_itself(fencing: Fencing):
    """As in: fencing run job --url-file <(pass show locks)."""
    url = fencing.environment.pop("FENCING_URL")
    reading, writing = os.pipe()
    os.write(writing, url.encode())
    os.close(writing)
    options = ("--url-file", f"/dev/fd/{reading}", "--pass-url")
    done = fencing("run", "job", *options, *ENVIRONMENT, pass_fds=(reading,))
    os.close(reading)
    assert variables(done.stdout)["FENCING_URL"] == url


def test_a_command_that_is_kept_from_the_store_does_not_take_another_one(fencing: Fencing):
    """It would lock this machine for itself."""
    inner = (
        f"{PROGRAM} run other -- touch ran; {PROGRAM} ls; {sys.executable} -c 'import fencing_sdk as f; f.connect()'"
    )
    done = fencing("run", "job", "--", "sh", "-c", inner)
    assert done.returncode != 0
    assert done.stderr.count("does not pass the URL of its store on; add --pass-url to it, or name a store here") == 3
    assert not fencing.state.exists()
    assert not fencing.path("ran").exists()
    named = f"{PROGRAM} run other --url sqlite:///other.db -- touch ran"
    assert fencing("run", "job", "--", "sh", "-c", named).returncode == 0
    passed = fencing("run", "job", "--pass-url", "--", *f"{PROGRAM} ls".split())
    assert passed.stdout.splitlines()[1].startswith("job ")


@pytest.mark.parametrize("named", [True, False])
def test_a_command_within_a_command_uses_the_same_store(fencing: Fencing, named: bool):
    if not named:
        del fencing.environment["FENCING_URL"]
    inner = (*PROGRAM.split(), "run", "job", "--wait", "forever", "--", "true")
    done = fencing("run", "job", *(("--pass-url",) if named else ()), "--", *inner)
    assert done.returncode == 2
    assert "'job' is held by the fencing run around this one" in done.stderr
