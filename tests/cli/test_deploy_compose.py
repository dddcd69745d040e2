"""The compose file of the page "Deploying": what is written in it is what Compose knows, and its commands are run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Fencing
from local_ports import HOST
from mysql_server import MysqlServer
from required_program import require_program
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

pytest_plugins = ["mysql_fixtures"]

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
TEXT = (DEPLOY / "compose.yaml").read_text()
FIRST_STEPS = "\n".join(line.removeprefix("#   ") for line in TEXT.splitlines() if line.startswith("#   "))
URL_FILE = "FENCING_URL_FILE"

KNOWN = {
    "": {"services", "secrets", "volumes"},
    "services.*": {
        *("image", "command", "environment", "env_file", "secrets", "volumes", "ports", "depends_on"),
        *("deploy", "restart", "healthcheck", "stop_grace_period"),
    },
    "services.*.healthcheck": {"test", "interval", "timeout", "retries", "start_period"},
    "services.*.depends_on.*": {"condition"},
    "services.*.deploy": {"replicas"},
    "secrets.*": {"file"},
}
"""The keys of the Compose specification that the file may have, by their place; elsewhere names are free."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, as kubectl reads YAML: it takes a text as what stands in a manifest of a kind that it does not know."""
    program = require_program("kubectl", "kubernetes-client")
    manifest = "apiVersion: any/v1\nkind: Any\nmetadata: {name: any}\nspec:\n" + re.sub("(?m)^", "  ", TEXT)
    command = [program, "patch", "--type=merge", "-p{}", "--local", "--filename=-", "--output=json"]
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    done = subprocess.run(command, input=manifest, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file: dict[str, Any] = json.loads(done.stdout)["spec"]
    return file


@pytest.fixture
def first_steps(tmp_path: Path) -> Path:
    """A folder in which the commands at the head of the file were run."""
    require_program("openssl")
    (folder := tmp_path / "first").mkdir()
    subprocess.run(["sh", "-e", "-c", FIRST_STEPS], cwd=folder, check=True)
    return folder


def keys(value: object, place: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each key below a place of `KNOWN`, with that place."""
    if isinstance(value, dict):
        for key, inside in value.items():
            for known in KNOWN:
                parts = tuple(filter(None, known.split(".")))
                if len(parts) == len(place) and all(a in {b, "*"} for a, b in zip(parts, place, strict=True)):
                    yield known, key
            yield from keys(inside, (*place, key))


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_compose_knows_each_key(compose) -> None:
    assert {(place, key) for place, key in keys(compose) if key not in KNOWN[place]} == set()
    assert {place for place, _ in keys(compose)} == set(KNOWN)


def test_the_tables_are_made_once_and_before_they_are_needed(compose) -> None:
    services = compose["services"]
    assert {name: service.get("depends_on") for name, service in services.items()} == {
        "database": None,
        "init": {"database": {"condition": "service_healthy"}},
        "shop": {"init": {"condition": "service_completed_successfully"}},
        "worker": {"init": {"condition": "service_completed_successfully"}},
    }
    assert "restart" not in services["init"], "a service that is started again does not end"


def test_no_password_is_in_the_file(compose, first_steps: Path) -> None:
    password = (first_steps / "secrets" / "password").read_text().strip()
    assert re.fullmatch("[0-9a-f]{32}", password)
    for service in compose["services"].values():
        variables = service["environment"]
        mine = [f"/run/secrets/{name}" for name in service["secrets"]]
        assert [value for key, value in variables.items() if key.endswith("_FILE")] == mine
        assert not {"FENCING_URL", "DATABASE_URL", "MYSQL_PASSWORD", "MYSQL_ROOT_PASSWORD"} & set(variables)
    declared = {secret["file"] for secret in compose["secrets"].values()} | set(compose["services"]["shop"]["env_file"])
    made = {path.relative_to(first_steps).as_posix(): path for path in (first_steps / "secrets").iterdir()}
    assert set(made) == declared
    assert {path.stat().st_mode & 0o777 for path in made.values()} == {0o600}
    assert all(password in path.read_text() for path in made.values())


def test_compose_waits_as_long_as_systemd_does_for_the_same_command(compose) -> None:
    """Its bound is longer than the service takes to end: test_deploy_files.py."""
    (command,) = re.findall(r"command: \[uvicorn.*", TEXT)
    assert command in (DEPLOY / "kubernetes.yaml").read_text()
    shop, worker = compose["services"]["shop"], compose["services"]["worker"]
    (patience,) = re.findall(r"TimeoutStopSec=(\d+)", (DEPLOY / "shop.service").read_text())
    assert (shop["stop_grace_period"], worker["stop_grace_period"]) == (f"{patience}s", "30s")


async def test_the_commands_run_on_the_database_of_the_file(
    fencing: Fencing, compose, first_steps: Path, mysql_server: MysqlServer
) -> None:
    """``fencing init``, the worker, and the URL of the service, as the user that the image creates."""
    database, init, worker = (compose["services"][name] for name in ("database", "init", "worker"))
    variables = database["environment"]
    user, name = variables["MYSQL_USER"], variables["MYSQL_DATABASE"]
    password = (first_steps / "secrets" / "password").read_text().strip()
    await mysql_server.execute(
        f"CREATE USER '{user}'@'%' IDENTIFIED BY '{password}'; GRANT ALL ON `{mysql_server.database}`.* TO '{user}'@'%'"
    )

    def here(text: str) -> str:
        """The same user and password, on the server of this test."""
        address = f"@database/{name}"
        assert address in text
        return text.strip().replace(address, f"@{HOST}:{mysql_server.port}/{mysql_server.database}")

    url = first_steps / "secrets" / "locks-url"
    url.write_text(here(url.read_text()))
    del fencing.environment["FENCING_URL"]
    fencing.environment[URL_FILE] = str(url)
    for _ in range(2):
        done = await asyncio.to_thread(fencing, *init["command"][1:])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "fencing: the store is ready\n")
    assert worker["command"][-3:] == ["--", "python", "worker.py"]
    done = await asyncio.to_thread(fencing, *worker["command"][1:-2], "sh", "-c", "exit 7")
    assert (done.returncode, done.stderr) == (7, "")

    variable, _, address = (first_steps / "secrets" / "shop.env").read_text().partition("=")
    assert variable == "DATABASE_URL"
    engine = create_async_engine(here(address))
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT current_user()"))).scalar_one() == f"{user}@%"
    await engine.dispose()
