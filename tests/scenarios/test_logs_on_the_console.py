"""A lost lease is seen on the console without any configuration, and once with one. Real processes, real uvicorn."""

import subprocess
import sys
from pathlib import Path

import pytest

LOSS = "lease on 'job' (token 1) is over: its deadline passed"

LOSES = """
async def lose(locks):
    lease = await locks.lock("job", ttl=300, max_hold=0.05).acquire()
    await lease.wait_lost()
"""

SCRIPT = f"""
import asyncio, logging, logging.config, sys
from fencing_sdk import connect
{LOSES}
async def main():
    async with connect("memory://", tokens="counter") as locks:
        await lose(locks)
    await asyncio.sleep(0)

{{configuration}}
asyncio.run(main())
"""

SERVICE = f"""
import asyncio, logging, os, signal
from contextlib import asynccontextmanager
from fastapi import FastAPI
from fencing_sdk import connect
{LOSES}
{{configuration}}
locks = connect("memory://", tokens="counter")

@asynccontextmanager
async def lifespan(app):
    async with locks:
        await lose(locks)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        yield

app = FastAPI(lifespan=lifespan)
"""

ROOT = "logging.basicConfig(format='%(levelname)s %(name)s %(message)s')"
OURS = "logging.getLogger('fencing_sdk').addHandler(logging.StreamHandler())"
BOTH_WAYS_OFF = {
    "NullHandler": "logging.getLogger('fencing_sdk').addHandler(logging.NullHandler())",
    "level": "logging.getLogger('fencing_sdk').setLevel(logging.CRITICAL)",
}


def run(folder: Path, *command: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=50)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def script(folder: Path, configuration: str = "") -> tuple[str, str]:
    return run(folder, "-W", "error", "-c", SCRIPT.replace("{configuration}", configuration))


def service(folder: Path, *options: str, configuration: str = "") -> tuple[str, str]:
    (folder / "service.py").write_text(SERVICE.replace("{configuration}", configuration))
    return run(folder, "-m", "uvicorn", "service:app", "--port", "0", *options)


def test_a_plain_script_shows_a_lost_lease_on_standard_error(tmp_path: Path):
    out, err = script(tmp_path)
    assert (out, err.splitlines()) == ("", [f"{LOSS}: max_hold=0.05 is over"])


@pytest.mark.parametrize(
    "configuration", [ROOT, OURS, f"{ROOT}; logging.getLogger().addHandler(logging.NullHandler())"]
)
def test_a_script_that_configures_logging_shows_it_once(tmp_path: Path, configuration: str):
    out, err = script(tmp_path, configuration)
    assert not out
    (line,) = err.splitlines()
    assert LOSS in line
    if configuration.startswith(ROOT):
        assert line.startswith("WARNING fencing_sdk lease on")


@pytest.mark.parametrize("configuration", BOTH_WAYS_OFF.values(), ids=BOTH_WAYS_OFF)
def test_it_can_be_turned_off(tmp_path: Path, configuration: str):
    assert script(tmp_path, configuration) == ("", "")


def test_uvicorn_as_it_comes_shows_a_lost_lease(tmp_path: Path):
    out, err = service(tmp_path)
    assert "Application startup complete" in err  # it logs as by default
    assert err.count(LOSS) == 1
    assert LOSS not in out


def test_uvicorn_beside_the_logging_of_an_application_shows_it_once(tmp_path: Path):
    _, err = service(tmp_path, configuration=ROOT)
    assert [line.partition(LOSS)[0] for line in err.splitlines() if LOSS in line] == ["WARNING fencing_sdk "]
