"""What a user sees who mistypes, or who has not installed the extra."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Fencing, StoreOptions, run_app

from fencing_sdk import __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "LOCK is missing; write: fencing run LOCK [OPTIONS] -- COMMAND"),
        (["run", "job"], "no command to run; write: fencing run LOCK -- COMMAND"),
        (["run", "job", "--", ""], "the name of the command is empty; write: fencing run LOCK -- COMMAND"),
        (["run", "job", "--ttl", "-3s", "--", "true"], "--ttl: expected a duration such as 90s, 5m or 1h"),
        (["run", "job", "--wait", "-3s", "--", "true"], "or: forever, not '-3s'"),
        (["doctor", "--for", "-3s"], "--for: expected a duration such as 90s, 5m or 1h"),
        (["run", "", "--", "true"], "name must not be empty"),
        (["run", "a\nb", "--", "true"], "control character"),
        (["run", "job", "--ttl", "0", "--", "true"], "ttl must be at least 0.05 s, got 0"),
        (["run", "job", "--ttl", "soon", "--", "true"], "--ttl: expected a duration such as 90s, 5m or 1h"),
        (["run", "job", "--ttl", "2d", "--", "true"], "ttl must be at most 86400 s, got 172800"),
        (["run", "job", "--wait", "-1", "--", "true"], "wait must be at least 0 s"),
        (["run", "job", "--wait", "soon", "--", "true"], "or a number of seconds, or: forever, not 'soon'"),
        (["run", "job", "--max-hold", "soon", "--", "true"], "--max-hold: expected a duration such as 90s, 5m or 1h"),
        (["run", "job", "--max-hold", "0", "--", "true"], "max_hold must be more than 0 s, got 0"),
        (["run", "job", "--label", "x" * 1025, "--", "true"], "label must be a str of at most 1024 characters"),
        (["run", "job", "--on-loss", "cry", "--", "true"], "kill"),
        (["run", "job", "--url", "nosuch://x", "--", "true"], "no backend for 'nosuch' URLs"),
        (["run", "job", "--url", "memory://", "--", "true"], "only inside one process"),
        (["run", "job", "-x", "true"], "unknown option '-x'"),
        (["ls", "a", "b"], "too many arguments; write: fencing ls [PATTERN] [OPTIONS]"),
        (["ls", "--limit", "1", "--limit=2"], "--limit occurs more than once"),
        (["show"], "LOCK is missing; write: fencing show LOCK [OPTIONS]"),
        (["break", "job"], "--reason is missing; write: fencing break LOCK --reason REASON [OPTIONS]"),
        (["ls", "sqlite:///x.db"], "sqlite://... is the URL of a store; write: fencing ls --url sqlite://..."),
        (["show", "redis://:hunter2@a"], "redis://... is the URL of a store; write: fencing show --url redis://..."),
        (
            ["show", "--url", "sqlite:///x.db", "redis://:hunter2@a"],
            "redis://... is the URL of a store; write: fencing show",
        ),
        (
            ["ls", "postgresql+asyncpg://u:hunter2@h/d"],
            "postgresql+asyncpg://... is the URL of a store; write: fencing ls",
        ),
        (["doctor", "etcd://a:2379"], "etcd://... is the URL of a store; write: fencing doctor --url etcd://..."),
        (["run", "redis://a", "--", "true"], "redis://... is the URL of a store; write: fencing run --url redis://..."),
        (["ls", "--limit", "abc"], "--limit: expected a whole number, not 'abc'"),
        (["run", "--permits", "two", "job", "--", "true"], "--permits: expected a whole number, not 'two'"),
        (["help"], "unknown command 'help'. Did you mean \"--help\"?"),
        (["version"], "unknown command 'version'. Did you mean \"--version\"?"),
        (["run", "job", "--permits", "0", "--", "true"], "permits must be a whole number from 1 to 1000, got 0"),
        (
            ["run", "job", "--permits", "2", "--shared", "--", "true"],
            "--permits and --shared are different ways to hold",
        ),
        (
            ["run", "job", "--shared", "--exclusive", "--", "true"],
            "--shared and --exclusive are different ways to hold",
        ),
        (
            ["run", "job", "--shared", "--at-least", "1s", "--", "true"],
            "--at-least goes without --shared: it keeps a lock",
        ),
        (["run", "job", "--metrics-file", "job.txt", "--", "true"], "--metrics-file must end with .prom"),
        (["run", "job", "--url", "", "--", "true"], "--url is empty"),
        (["ls", "--url", "memory://", "--url-file", "url"], "--url and --url-file both name a store"),
        (["ls", "--url-file", "url"], "--url-file 'url' cannot be read: No such file or directory"),
        (["init"], "--url is missing, and FENCING_URL is not set"),
        (["init", "--url", "nosuch://x"], "no backend for 'nosuch' URLs"),
        (["rnu"], 'Did you mean "run"?'),
    ],
)
def test_wrong_usage_is_one_line_on_standard_error_and_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("FENCING_URL", "" if arguments == ["init"] else "sqlite:///locks.db")
    monkeypatch.chdir(tmp_path)
    assert run_app(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("fencing: ")
    assert len(err.splitlines()) == 1
    assert not out


@pytest.mark.parametrize("arguments", [["--url=redis://:secret@host", "ls"], ["ls", "--json=redis://:secret@host"]])
def test_what_stands_behind_an_option_that_takes_nothing_is_not_repeated(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run_app(arguments) == 2
    assert "secret" not in capsys.readouterr().err


def test_a_system_without_process_groups_is_told_so_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delattr(os, "posix_spawn")
    monkeypatch.setitem(sys.modules, "fencing_sdk.cli.run", None)
    assert run_app(["run", "job", "--", "true"]) == 2
    assert "this system does not have" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "job", "--", "true"], ["demo"]], ids=lambda given: given[0])
def test_a_frozen_program_refuses_what_starts_another_python(arguments, fencing: Fencing, monkeypatch, capsys):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for variable, value in fencing.environment.items():
        monkeypatch.setenv(variable, value)
    assert run_app(arguments) == 2
    assert "a frozen program has none" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--url", "--urll", "--urll=", "-u"])
def test_the_url_is_never_repeated(option: str, capsys: pytest.CaptureFixture[str]):
    url = "nosuch://user:secret@host"
    given = [f"{option}{url}"] if option.endswith("=") else [option, url]
    assert run_app(["run", "job", *given, "--", "true"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_options_stand_before_between_and_after_the_words_and_behind_two_hyphens_all_are_words(fencing: Fencing):
    for given in (
        ["run", "--ttl", "20s", "job", "--quiet", "--", "echo", "--ttl", "--", "-x"],
        ["run", "job", "--ttl=20s", "--", "echo", "--ttl", "--", "-x"],
        ["run", "--ttl", "20s", "--", "job", "echo", "--ttl", "--", "-x"],
    ):
        done = fencing(*given)
        assert (done.returncode, done.stdout) == (0, "--ttl -- -x\n")


@pytest.mark.parametrize("state", ["", "relative"])
def test_without_a_usable_state_folder_the_one_of_the_home_is_taken(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"XDG_STATE_HOME": state, "HOME": str(tmp_path / "a b?c#d%"), "FENCING_URL": ""}.items():
        monkeypatch.setenv(name, value)
    assert StoreOptions().store().url == f"sqlite:///{tmp_path}/a%20b%3Fc%23d%25/.local/state/fencing/locks.db"
    assert (tmp_path / "a b?c#d%" / ".local" / "state" / "fencing").is_dir()


def test_a_state_folder_that_cannot_be_made_means_69(fencing: Fencing):
    del fencing.environment["FENCING_URL"]
    fencing.state.write_text("in the way")
    done = fencing("run", "job", "--", "true")
    assert done.returncode == 69
    assert "FENCING_URL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from fencing_sdk.cli import main; sys.exit(main())"


def test_without_the_extra_there_is_a_hint_and_no_traceback(fencing: Fencing):
    command = [sys.executable, "-c", WITHOUT_RICH, "show", "job"]
    done = subprocess.run(command, env=fencing.environment, capture_output=True, text=True)
    assert done.returncode == 2
    hint = "fencing: rich is not installed; run: pip install 'fencing-sdk[cli]', or '.[cli]' in a checkout\n"
    assert done.stderr == hint


def test_a_command_is_run_without_the_extra(fencing: Fencing):
    command = [sys.executable, "-c", WITHOUT_RICH, "run", "job", "--", "echo", "done"]
    done = subprocess.run(command, env=fencing.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


LOADED = """
import sys
LOOKED_FOR = "fencing_sdk.", "aiohttp", "argparse", "importlib.resources", "rich", "anyio._backends"
sys.argv[1:] = {arguments}
from fencing_sdk.cli import main
code = main()
print(code, sorted(name for name in sys.modules if name.startswith(LOOKED_FOR)))
"""


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["run", "job", "--", "true"], ["hold", "job", "--holder", "a", "--quiet"]],
    ids=lambda given: given[0],
)
def test_what_cron_starts_loads_neither_guards_nor_recipes_nor_events_nor_other_stores_nor_rich(
    arguments: list[str], fencing: Fencing
):
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(arguments=arguments)],
        env=fencing.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    code, _, listed = done.stdout.partition(" ")
    modules = set(ast.literal_eval(listed))
    assert code == "0"
    assert "argparse" in modules
    rooms = {".".join(name.split(".")[1:3]) for name in modules if name.startswith("fencing_sdk.")}
    loaded = {room for room in rooms if room.split(".")[0] not in {"_engine", "_values", "abc", "cli"}}
    assert not {name for name in modules if name.startswith(("aiohttp", "importlib.resources", "rich"))}
    assert ("anyio._backends._asyncio" in modules) == (arguments[0] == "run"), "a scope, where a block follows"
    assert {room for room in loaded if room.startswith("backends.")} == {"backends._shared", "backends.sqlite"}
    assert not {room.split(".")[0] for room in loaded} & {
        *("diagnosis", "events", "guards", "integrations", "recipes", "sync", "testing", "_http", "_etcd", "_kahuna")
    }


def test_a_module_of_our_own_that_is_missing_is_not_the_user_s_fault():
    code = "import sys; sys.modules['fencing_sdk.cli.run'] = None; from fencing_sdk.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run"], capture_output=True, text=True)
    assert "Traceback" in done.stderr


def test_the_module_is_the_command(fencing: Fencing):
    shown = fencing("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("fencing", "run", "demo", "break"))


@pytest.mark.parametrize("command", ["run", "hold", "renew", "release", "init", "demo"])
def test_every_command_is_on_the_page_with_every_option_and_has_no_other(
    command: str, capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parent.parent.parent / "docs" / "cli.md").read_text()
    heading = re.search(rf"^## fencing .*\b{command}\b.*$", page, re.MULTILINE)
    assert heading
    rest = page[heading.end() :]
    assert run_app([command, "--help"]) == 0
    shown = capsys.readouterr().out.partition("Parameters:")[2]
    options = set(re.findall(r"--[a-z-]+", shown)) - {"--"}
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", rest.partition("\n## ")[0]))
    assert not [option for option in options if option.startswith(("--empty-", "--no-"))]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    assert run_app(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_nothing_is_coloured_where_nobody_looks_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (run_app(["run", "--help"]), run_app(["run", "job"])) == (0, 2)
    assert "\x1b" not in "".join(capsys.readouterr())


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "fencing_sdk.cli._app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from fencing_sdk.cli import main
sys.exit(main())
"""


def test_an_interrupt_during_the_imports_leaves_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, "ls"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
