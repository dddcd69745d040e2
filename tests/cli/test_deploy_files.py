"""The files of the page "Deploying" are read by the programs that they are for, and their commands are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from command_line import PATIENCE, Fencing, until
from required_program import require_program

pytestmark = pytest.mark.slow

Manifest = dict[str, Any]

pytest_plugins = ["postgresql_fixtures", "redis_fixtures"]

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deploy"
UNITS = sorted(path for path in FILES.iterdir() if path.suffix in {".service", ".timer"})
SERVICES = [path for path in UNITS if path.suffix == ".service"]
FASTAPI = (ROOT / "docs" / "fastapi.md").read_text()


def settings(unit: Path) -> dict[str, str]:
    lines = [line.partition("=") for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return {key: value for key, _, value in lines}


def of_fencing(words: list[str]) -> tuple[list[str], list[str]]:
    """Split ``fencing run ... -- command`` into what `fencing` gets, with its ``--``, and the command."""
    assert words[0].rpartition("/")[2] == "fencing"
    end = words.index("--") + 1
    return words[1:end], words[end:]


# systemd


@pytest.fixture
def systemd_says(tmp_path: Path):
    program = require_program("systemd-analyze", "systemd")

    def says(unit: str, text: str) -> str:
        folder = tmp_path / "units"
        for path in UNITS:
            copy(path.read_text(), folder / path.name)
        copy(text, folder / unit)
        for name in ("fencing", "uvicorn"):
            (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
            (tmp_path / "bin" / name).chmod(0o755)
        done = subprocess.run([program, "verify", "--man=no", folder / unit], capture_output=True, text=True)
        return done.stdout + done.stderr

    def copy(text: str, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("/srv/app", str(tmp_path)))

    (tmp_path / "bin").mkdir()
    return says


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_knows_each_line_of_a_unit(unit: Path, systemd_says) -> None:
    assert systemd_says(unit.name, unit.read_text()) == ""


def test_systemd_does_not_know_a_line_with_a_typing_error(systemd_says) -> None:
    text = (FILES / "beat.service").read_text().replace("KillMode", "KilMode")
    assert "Unknown key 'KilMode' in section [Service]" in systemd_says("beat.service", text)


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_sigterm_of_systemd_reaches_the_first_process_alone(unit: Path) -> None:
    """``fencing run`` forwards it to its command, which would otherwise get it twice."""
    assert settings(unit)["KillMode"] == "mixed"


def seconds_of_the_service(command: list[str]) -> int:
    """How long the service of the page on FastAPI takes to end at most, by its command and its code."""
    assert f"$ {shlex.join(command)}\n" in FASTAPI, "another command than that of the page"
    drain = re.search(r"drain=(\d+)", FASTAPI)
    assert drain is not None
    return int(command[command.index("--timeout-graceful-shutdown") + 1]) + int(drain[1])


def test_systemd_waits_longer_than_the_service_takes_to_end() -> None:
    service = settings(FILES / "shop.service")
    command = shlex.split(service["ExecStart"].replace("/srv/app/bin/", ""))
    assert seconds_of_the_service(command) < int(service["TimeoutStopSec"])


@pytest.mark.parametrize("unit", ["nightly.service", "beat.service"])
def test_the_command_of_a_unit_is_one_that_fencing_run_takes(fencing: Fencing, unit: str) -> None:
    arguments, _ = of_fencing(shlex.split(settings(FILES / unit)["ExecStart"]))
    done = fencing(*arguments, "sh", "-c", "exit 7")
    assert (done.returncode, done.stderr) == (7, "")


def test_a_run_that_is_skipped_or_stopped_is_no_failure_to_systemd(fencing: Fencing) -> None:
    no_failure = {int(code) for code in settings(FILES / "nightly.service")["SuccessExitStatus"].split()}
    arguments, _ = of_fencing(shlex.split(settings(FILES / "nightly.service")["ExecStart"]))
    running = fencing.start(*arguments, "sh", "-c", "echo > started; exec sleep 600")
    until(fencing.path("started").exists)
    skipped = fencing(*arguments, "true").returncode
    running.send_signal(signal.SIGTERM)
    assert {skipped, running.wait(PATIENCE)} == no_failure == {75, 143}


# Kubernetes


@pytest.fixture(scope="module")
def kubectl() -> Callable[..., list[Manifest]]:
    program = require_program("kubectl", "kubernetes-client")

    def run(*words: str, text: str = (FILES / "kubernetes.yaml").read_text()) -> list[Manifest]:
        """What kubectl makes of the manifests in *text*, without any cluster."""
        command = [program, *words, "--local", "--filename=-", "--output=json"]
        environment = {**os.environ, "KUBECONFIG": os.devnull}
        done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return list(documents(done.stdout))

    return run


@pytest.fixture(scope="module")
def manifests(kubectl) -> dict[str, Manifest]:
    """The manifests as kubectl reads YAML, by their names."""
    return {manifest["metadata"]["name"]: manifest for manifest in kubectl("patch", "--type=merge", "-p{}")}


def documents(text: str) -> Iterator[Manifest]:
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        yield document
        text = text[end:]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Each value of a manifest, with the path to it; kubectl has put in an image of its own."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from leaves(inside, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inside in enumerate(value):
            yield from leaves(inside, f"{path}[{number}]")
    elif not path.endswith(".image"):
        yield path, value


def test_kubernetes_has_each_field_of_the_manifests_and_no_misspelt_one(kubectl) -> None:
    """Where kubectl knows the type of an object, it drops the fields that the type does not have."""

    def unknown(text: str) -> set[str]:
        written = kubectl("patch", "--type=merge", "-p{}", text=text)
        typed = kubectl("set", "image", "*=another", text=text)
        pairs = zip(written, typed, strict=True)
        return {path for one, other in pairs for path, _ in set(leaves(one)) - set(leaves(other))}

    text = (FILES / "kubernetes.yaml").read_text()
    assert unknown(text) == set()
    misspelt = text.replace("terminationGracePeriodSeconds: 40", "terminationGracePeriod: 40")
    assert unknown(misspelt) == {".spec.template.spec.terminationGracePeriod"}


def container(manifests, name: str):
    pod = manifests[name]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_kubernetes_waits_longer_than_the_service_takes_to_end(manifests) -> None:
    pod, shop = container(manifests, "shop")
    command = [word for word in shop["command"] if word not in {"--host", "0.0.0.0"}]
    pause = int(shop["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + seconds_of_the_service(command) < pod["terminationGracePeriodSeconds"]


def test_the_probe_asks_what_the_service_answers(manifests) -> None:
    _, shop = container(manifests, "shop")
    probe = shop["readinessProbe"]["httpGet"]
    assert f'@app.get("{probe["path"]}")' in FASTAPI
    assert probe["port"] == shop["ports"][0]["containerPort"] == 8000


def test_the_file_with_the_url_is_there_and_private(manifests) -> None:
    for manifest in manifests.values():
        pod = manifest["spec"]["template"]["spec"]
        assert pod["volumes"] == [{"name": "locks", "secret": {"secretName": "locks", "defaultMode": 0o400}}]
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {"name": "FENCING_URL_FILE", "value": "/etc/fencing/url"} in one["env"]
            assert one["volumeMounts"] == [{"name": "locks", "mountPath": "/etc/fencing", "readOnly": True}]


def test_five_pods_make_the_tables_at_once(fencing: Fencing, postgresql_server) -> None:
    """The command of the init container, in five processes."""
    assert "command: [fencing, init]" in (FILES / "kubernetes.yaml").read_text()
    del fencing.environment["FENCING_URL"]
    url = fencing.path("url")
    url.write_text(f"{postgresql_server.url}\n")
    url.chmod(0o400)
    fencing.environment["FENCING_URL_FILE"] = str(url)
    with psycopg.connect(postgresql_server.url) as held:
        held.execute(
            "LOCK TABLE pg_catalog.pg_class IN SHARE ROW EXCLUSIVE MODE"
        )  # they look, and none makes a table yet
        pods = [fencing.start("init") for _ in range(5)]
        until(lambda: postgresql_server.ask("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(5,)], "all five")
    ended = [(*pod.communicate(timeout=PATIENCE), pod.returncode) for pod in pods]
    assert ended == [("", "fencing: the store is ready\n", 0)] * 5
    assert fencing("run", "a", "--", "true").returncode == 0


# The first process of a container

ENTRY = {
    key: json.loads(words)
    for key, words in re.findall(r"^(ENTRYPOINT|CMD) (.*)$", (FILES / "Dockerfile").read_text(), re.MULTILINE)
}
WORKER = """
import os, pathlib, signal, subprocess, sys

subprocess.run(["sh", "-c", "sleep 600 & echo $! > orphan"])  # its parent has ended: it belongs to the first process
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
pathlib.Path("parent").write_text(f"{os.getppid()}\\n")
signal.pause()
"""


def namespaces() -> list[str]:
    """A command that starts another one as the first process of a namespace, or nothing where that is not allowed."""
    program = shutil.which("unshare")
    ways = [["--pid"], ["--user", "--map-root-user", "--pid"]] if program else []
    for options in ways:
        command = [program, *options, "--fork", "--mount-proc", "--kill-child"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return []


@pytest.mark.parametrize(("handled", "code"), [([], 143), (["0"], 0), (["5"], 5)])
def test_the_first_process_of_a_container_hands_sigterm_and_the_exit_code_on(
    fencing: Fencing, handled: list[str], code: int
) -> None:
    """By ENTRYPOINT and CMD of the Dockerfile, as `docker stop` ends them."""
    arguments, end = of_fencing(ENTRY["ENTRYPOINT"])
    assert end == []
    assert ENTRY["CMD"] == ["python", "worker.py"]
    fencing.path("worker.py").write_text(WORKER)
    inside = namespaces()
    command = [*inside, sys.executable, "-m", "fencing_sdk", *arguments, sys.executable, "worker.py", *handled]
    started = subprocess.Popen(command, cwd=fencing.folder, env=fencing.environment)
    try:
        parent = int(fencing.appears("parent"))
        first = started.pid
        if inside:
            assert parent == 1
            first = int(Path(f"/proc/{first}/task/{first}/children").read_text())
        os.kill(first, signal.SIGTERM)
        assert started.wait(PATIENCE) == code
    finally:
        started.kill()
        started.wait()
    assert json.loads(fencing("show", "worker", "--json").stdout)["holders"] == []


# cron


@pytest.fixture
def mail(fencing: Fencing):
    """Run the line of the crontab as cron does; return what it would mail."""
    *assignments, line = [
        line for line in (FILES / "nightly.cron").read_text().splitlines() if line[:1] not in {"", "#"}
    ]
    given = dict(assignment.split("=", 1) for assignment in assignments)
    assert given.keys() == {"SHELL", "PATH", "MAILTO", "FENCING_URL_FILE"}
    *_, user, command = line.split(maxsplit=6)
    assert user == "app"
    assert "%" not in command, "cron would end the line there"
    (tools := fencing.path("bin")).mkdir()
    (tools / "fencing").write_text(f'#!/bin/sh\nexec {sys.executable} -m fencing_sdk "$@"\n')
    (tools / "fencing").chmod(0o755)
    del fencing.environment["FENCING_URL"]
    environment = {
        **fencing.environment,
        "PATH": f"{tools}:{given['PATH']}",
        "FENCING_URL_FILE": str(fencing.path("url")),
    }
    command = command.replace("/srv/app", str(fencing.folder)).replace("/var/log", str(fencing.folder))

    def run(script: str, url: str = f"sqlite:///{fencing.store}") -> str:
        fencing.path("url").write_text(url)
        fencing.path("url").chmod(0o600)
        fencing.path("nightly.sh").write_text(f"#!/bin/sh\n{script}\n")
        fencing.path("nightly.sh").chmod(0o755)
        command_of_cron = [given["SHELL"], "-c", command]
        return subprocess.run(
            command_of_cron,
            cwd=fencing.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout

    return run


def test_cron_mails_failures_and_neither_what_ran_nor_what_was_skipped(fencing: Fencing, mail) -> None:
    assert mail("echo so much; echo too bad >&2; exit 3") == "too bad\nnightly ended with 3\n"
    assert mail("echo all is well") == ""
    assert mail("echo on another machine") == ""
    assert fencing.path("nightly.log").read_text() == "so much\nall is well\n"


def test_cron_mails_that_the_store_is_away(mail) -> None:
    *said, last = mail("true", "redis://127.0.0.1:1").splitlines()
    assert last == "nightly ended with 69"
    assert len(said) == 1
    assert said[0].startswith("fencing: ")


# Two beats of Celery

SCHEDULE = """
from celery import Celery

app = Celery("config", broker="{url}")
app.conf.beat_schedule = {{"tick": {{"task": "tick", "schedule": 0.1}}}}
"""


def test_of_two_beats_one_runs_and_the_other_one_follows(fencing: Fencing, redis_server) -> None:
    """The command of beat.service, twice."""
    arguments, command = of_fencing(shlex.split(settings(FILES / "beat.service")["ExecStart"]))
    assert command[0] == "/srv/app/bin/celery"
    fencing.path("config.py").write_text(SCHEDULE.format(url=redis_server.url))

    def beat(number: int) -> subprocess.Popen[str]:
        words = [word.replace("/var/lib/app/beat", str(fencing.path(f"beat{number}"))) for word in command[1:]]
        with fencing.path(f"log{number}").open("w") as log:
            return fencing.start(*arguments, sys.executable, "-m", "celery", *words, stdout=log, stderr=log)

    def began(number: int) -> bool:
        return "beat: Starting" in fencing.path(f"log{number}").read_text()

    fencing.environment["PYTHONPATH"] = os.pathsep.join([str(fencing.folder), *filter(None, sys.path)])
    with closing(redis.Redis.from_url(redis_server.url)) as broker:
        first = beat(1)
        until(lambda: broker.llen("celery") > 3, "ticks of the first beat")
        second = beat(2)
        until(lambda: json.loads(fencing("show", "beat", "--json").stdout)["waiting"], "the second one in the line")
        assert began(1)
        assert not began(2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE) in {0, *map(int, settings(FILES / "beat.service")["SuccessExitStatus"].split())}
        sent = broker.llen("celery")
        until(lambda: began(2) and broker.llen("celery") > sent, "ticks of the second beat")
        second.send_signal(signal.SIGTERM)
        second.wait(PATIENCE)


# The page


def test_the_page_shows_each_file_and_links_to_it() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    files = {path.name for path in FILES.iterdir()}
    assert set(re.findall(r"\{literalinclude\} \.\./examples/deploy/(\S+)", page)) == files
    assert set(re.findall(r"\]\(\.\./examples/deploy/(\S+)\)", page)) == files
