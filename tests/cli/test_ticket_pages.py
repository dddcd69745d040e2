"""The scripts, the unit, the CI steps and the hooks of the pages about tickets are run as they stand there."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import PATIENCE, Fencing
from required_program import require_program

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
STEPS, AGENTS = ((RECIPES / f"{name}.md").read_text() for name in ("steps", "agents"))
BLOCK = re.compile(r"^```(?:sh|ini|yaml|json|python skip)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def block(page: str, marked: str) -> str:
    """Return the only block of a page that has the line *marked*."""
    (found,) = [text for text in BLOCK.findall(page) if marked in text.splitlines()]
    return found


class Machine(Fencing):
    """A folder with the program `fencing` in its path, and steps that write down under which token they ran."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "bin").mkdir()
        self.script("bin/fencing", f'#!/bin/sh\nexec {sys.executable} -m fencing_sdk "$@"\n')
        for step in ("build", "migrate", "switch"):
            self.script(f"{step}.sh", f"#!/bin/sh\necho {step} ${{FENCING_TOKEN:-none}} >> steps\n")
        self.environment |= {
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{
                f"GIT_{who}_{what}": "agent@example.org"
                for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
        }

    def script(self, name: str, text: str) -> None:
        self.path(name).write_text(text)
        self.path(name).chmod(0o755)

    def sh(self, script: str, *arguments: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = ["bash", "-c", script, "bash", *arguments], self.environment | variables
        return subprocess.run(
            command, cwd=self.folder, env=environment, input=text, capture_output=True, text=True, timeout=PATIENCE
        )

    def steps(self) -> list[tuple[str, int]]:
        """Return the steps that ran, with their tokens: 0 for none."""
        lines = self.path("steps").read_text().split("\n")[:-1]
        return [(step, 0 if token == "none" else int(token)) for step, token in map(str.split, lines)]

    def held(self) -> list[str]:
        return [json.loads(line)["label"] for line in self("ls", "--json").stdout.splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.clean_up()


# Several steps, one lease


def test_the_steps_of_the_shell_script_run_under_one_lease(machine: Machine):
    machine.script("deploy.sh", block(STEPS, "# deploy.sh"))
    done = machine.sh("./deploy.sh v7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (_, none), (_, migrated), (last, switched) = machine.steps()
    assert (none, last, migrated < switched) == (0, "switch", True)
    assert machine.held() == [], "given back at the end"


def test_the_shell_script_ends_where_its_lease_was_lost_and_runs_beside_no_other(machine: Machine):
    machine.script("deploy.sh", block(STEPS, "# deploy.sh"))
    machine.script("build.sh", "#!/bin/sh\nfencing ls; fencing break deploy --reason 'it hangs' --yes\n")
    done = machine.sh("./deploy.sh v7")
    assert "release v7" in done.stdout
    assert done.returncode == 76
    assert ": an operator took the lock away: it hangs" in done.stderr
    assert not machine.path("steps").exists()


def steps_of(*jobs: str) -> list[str]:
    return [step for job in jobs for step in re.findall(r"- run: (.*)", job)]


def test_the_steps_of_a_ci_job_run_under_one_lease(machine: Machine):
    where = {"RUNNER_TEMP": str(machine.folder), "GITHUB_ENV": str(machine.path("env")), "GITHUB_SHA": "v7"}
    machine.path("env").touch()
    for step in steps_of(block(STEPS, "# .github/workflows/deploy.yml")):
        variables = dict(line.split("=", 1) for line in machine.path("env").read_text().splitlines())
        assert machine.sh(step, **where, **variables).returncode == 0
    tokens = [token for _, token in machine.steps()]
    assert [step for step, _ in machine.steps()] == ["build", "migrate", "switch"]
    assert 0 < tokens[0] < tokens[1] < tokens[2]
    assert machine.held() == []


def test_jobs_on_several_machines_send_the_ticket_encrypted(machine: Machine):
    require_program("openssl")
    text = block(STEPS, "# in the first job")
    first, others, last = re.split(r"^# in .*\n", text, flags=re.MULTILINE)[1:]
    machine.environment |= {"TICKET_KEY": "a secret of the pipeline", "GITHUB_SHA": "v7"}
    for job in (first, others, others, last):
        for step in steps_of(job):
            assert machine.sh(step).returncode == 0
        if job is not last:
            assert machine.path("ticket").stat().st_mode & 0o777 == 0o600
            assert b"fencing1." not in machine.path("ticket.enc").read_bytes()
            if job is others:
                machine.path("ticket").unlink()
                machine.sh(steps_of(others)[0])
    assert [step for step, _ in machine.steps()] == ["switch", "switch"]
    assert machine.held() == []


def test_systemd_knows_the_unit_whose_commands_run_under_one_lease(machine: Machine):
    program = require_program("systemd-analyze", "systemd")
    unit = block(STEPS, "# deploy.service").replace("/srv/app", str(machine.folder))
    machine.path("deploy.service").write_text(unit)
    done = subprocess.run(
        [program, "verify", "--man=no", machine.path("deploy.service")], capture_output=True, text=True
    )
    assert done.stdout + done.stderr == ""
    for command in re.findall(r"^Exec\w+=(.*)", unit, re.MULTILINE):
        words = [word.replace("/run/deploy", str(machine.folder)) for word in shlex.split(command)]
        assert machine.sh(shlex.join(words)).returncode == 0
    assert [step for step, _ in machine.steps()] == ["migrate", "switch"]
    assert machine.held() == []


# Many agents, one repository


@pytest.fixture
def repository(machine: Machine) -> Machine:
    require_program("git")
    assert machine.sh("git init -q -b main . && git commit -q --allow-empty -m first").returncode == 0
    hook = block(AGENTS, "# reference-transaction").replace("/usr/bin/env python3", sys.executable)
    machine.script(".git/hooks/reference-transaction", hook)
    machine.script(".git/hooks/pre-commit", block(AGENTS, "# pre-commit"))
    return machine


HOLD = block(AGENTS, 'fencing hold repo --holder "$SESSION" --ttl 10m --label "$SESSION renames the API"')
COMMIT = block(AGENTS, 'env $(fencing renew repo --holder "$SESSION") git commit -m "rename the API"')
EMPTY_COMMIT = COMMIT.replace("git commit", "git commit --allow-empty")
AGENT = """
set -a; eval "$(fencing hold repo --holder "$SESSION" --ttl 3s)"; set +a
echo "holds $FENCING_TOKEN"
read go
fencing hold repo --holder "$SESSION"; echo "hold $?"
git commit -q --allow-empty -m late; echo "commit $?"
git commit -q --allow-empty -m late --no-verify; echo "no-verify $?"
mv .git/hooks/reference-transaction .
git commit -q --allow-empty -m late --no-verify; echo "without the guard $?"
"""


def commits(repository: Machine) -> list[str]:
    return repository.sh("git log --format=%s").stdout.split("\n")[:-1]


def test_an_agent_commits_under_its_lease_and_no_other_does(repository: Machine):
    repository.path("f").write_text("1")
    assert repository.sh("git add f").returncode == 0
    assert repository.sh("git commit -q -m early --no-verify").returncode != 0, "no token"
    assert repository.sh(HOLD, SESSION="agent-1").returncode == 0
    other = repository.sh(HOLD, SESSION="agent-2")
    assert (other.returncode, "agent-1 renames the API" in other.stderr) == (75, True)
    for verify in ("", " --no-verify"):
        done = repository.sh(COMMIT.strip() + verify, SESSION="agent-2")
        assert (done.returncode == 0, "refused" in done.stderr or "no ticket" in done.stderr) == (False, True)
    assert repository.sh(COMMIT, SESSION="agent-1").returncode == 0
    assert commits(repository) == ["rename the API", "first"]
    assert repository.sh(HOLD, SESSION="").returncode == 2, "two agents without a name are not one"


def test_an_agent_that_was_frozen_is_refused_when_it_goes_on(repository: Machine):
    """Two real processes. The last line of the first one shows that the guard does it."""
    frozen = subprocess.Popen(
        ["bash", "-c", AGENT],
        cwd=repository.folder,
        env=repository.environment | {"SESSION": "agent-1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with frozen:
        assert frozen.stdout is not None
        token = int(frozen.stdout.readline().removeprefix("holds "))
        frozen.send_signal(signal.SIGSTOP)
        taken = repository.sh(f"{HOLD.strip()} --wait 5m", SESSION="agent-2")
        assert int(taken.stdout.splitlines()[0].removeprefix("FENCING_TOKEN=")) > token
        assert (
            repository.sh(COMMIT.replace("git commit", "git commit --allow-empty"), SESSION="agent-2").returncode == 0
        )
        frozen.send_signal(signal.SIGCONT)
        out, err = frozen.communicate("go\n", timeout=PATIENCE)
    ends = dict(line.rsplit(" ", 1) for line in out.splitlines())
    assert (ends["hold"], ends["without the guard"]) == ("75", "0")
    assert "0" not in {ends["commit"], ends["no-verify"]}
    assert f"refused: token {token} for 'branches' refused: the resource has seen " in err
    assert commits(repository) == ["late", "rename the API", "first"]


def test_worktrees_share_one_fence(repository: Machine):
    assert repository.sh(HOLD, SESSION="agent-1").returncode == 0
    assert repository.sh(EMPTY_COMMIT, SESSION="agent-1").returncode == 0
    seen = repository.sh('eval "$(fencing renew repo --holder agent-1)"; echo "$FENCING_TOKEN"').stdout.strip()
    older = {"FENCING_TOKEN": str(int(seen) - 1), "FENCING_HOLDER": "9f8a01c2"}
    add = "git worktree add -q -b other other"
    assert repository.sh(add, **older).returncode != 0, "a branch is made"
    assert repository.sh(f"env $(fencing renew repo --holder agent-1) {add}").returncode == 0
    late = repository.sh("cd other && git commit -q --allow-empty -m late --no-verify", **older)
    assert (late.returncode == 0, f"the resource has seen {seen}" in late.stderr) == (False, True)


def test_the_tool_hook_refuses_an_edit_and_says_who_works(machine: Machine):
    machine.path(".hooks").mkdir()
    for hook in ("tool-hook", "session-end"):
        machine.script(f".hooks/{hook}", block(AGENTS, f"# {hook}"))
    hooks = json.loads(block(AGENTS, '  "hooks": {'))["hooks"]
    (edit,), (end,) = ([one["command"] for one in hooks[when][0]["hooks"]] for when in ("PreToolUse", "SessionEnd"))
    calls = [json.dumps({"session_id": f"session-{n}", "tool_name": "Edit"}) for n in (1, 2)]
    for _ in range(2):
        assert machine.sh(edit, text=calls[0]).returncode == 0
    refused = machine.sh(edit, text=calls[1])
    assert (refused.returncode, "lock 'repo' is held by " in refused.stderr, "session-1" in refused.stderr) == (
        2,
        True,
        True,
    )
    assert machine.sh(edit, text="{}").returncode == 2
    assert machine.sh(end, text=calls[0]).returncode == 0
    assert machine.sh(edit, text=calls[1]).returncode == 0
