"""The commands and their arguments, and what an error of the user's looks like."""
# ruff: noqa: PLC0415  (what cron starts every minute loads no more than its command needs)

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fencing_sdk import __version__
from fencing_sdk.cli._options import Arguments, HelpShown, parse_number
from fencing_sdk.cli._streams import (
    Exit,
    OutputClosedError,
    console,
    escape_what_cannot_be_shown,
    say,
    silence,
    write_out,
)
from fencing_sdk.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from argparse import Namespace

    from fencing_sdk.cli.detached import DetachedLock

_NO_LIMIT = sys.maxsize


def run_app(arguments: Sequence[str]) -> int:
    """Run the command in *arguments*; return its exit code."""
    escape_what_cannot_be_shown()
    try:
        return _run(*arguments) if arguments else _run("--help")
    except ConfigurationError as error:
        say(str(error))
        return Exit.USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OutputClosedError as error:
        silence(sys.stdout)
        if isinstance(error.__cause__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        say(f"standard output cannot be written: {getattr(error.__cause__, 'strerror', None)}")
        return Exit.OUTPUT


def _run(word: str, *arguments: str) -> int:
    if word in {"--help", "-h"}:
        write_out(_overview())
    elif word == "--version":
        write_out(f"{__version__}\n")
    elif word in COMMANDS:
        try:
            return COMMANDS[word](arguments)
        except HelpShown:
            return 0
    else:
        from difflib import get_close_matches

        near = get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
        hint = f'Did you mean "{near[0]}"?' if near else f"Known are {', '.join(COMMANDS)}."
        said = word.partition("=")[0] if word.startswith("-") else word  # what follows may be a URL with a password
        msg = f"unknown command {shown(said)}. {hint}"
        raise ConfigurationError(msg)
    return 0


def _overview() -> str:
    commands = "".join(
        f"  {name:<10}{(inspect.getdoc(command) or '').partition(chr(10))[0]}\n" for name, command in COMMANDS.items()
    )
    return (
        "Usage: fencing COMMAND\n\nDistributed locks that stay harmless when they are lost.\n\n"
        f"Commands\n{commands}\nMore about one: fencing COMMAND --help. The version: fencing --version.\n"
    )


def run(arguments: Sequence[str]) -> int:
    """Run a command while holding a lock.

    The command finds FENCING_TOKEN, FENCING_HOLDER, FENCING_LOCK and
    FENCING_DEADLINE in its environment. Its exit code is passed through.
    Otherwise: 75 the lock is taken and nothing was run, 76 the lease was lost and
    the command was stopped, 69 the store cannot be used, 2 wrong usage.

    Times are durations such as 90s, 5m or 1h, or plain seconds.
    """
    if not hasattr(os, "posix_spawn"):
        msg = "fencing run needs process groups and signals, which this system does not have"
        raise ConfigurationError(msg)
    from fencing_sdk.cli.run import CommandRun, run_job

    given, words = _run_arguments().read(arguments, least=1, most=_NO_LIMIT)
    lock, *command = words if given.ticket is None else ["", *words]
    if given.ticket is not None:
        _check_goes_with_ticket(given, words, arguments)
    if not command or not command[0]:
        problem = "the name of the command is empty" if command else "no command to run"
        msg = f"{problem}; write: fencing run LOCK -- COMMAND"
        raise ConfigurationError(msg)
    asked = {"--permits": given.permits is not None, "--shared": given.shared, "--exclusive": given.exclusive}
    ways = [way for way, chosen in asked.items() if chosen]
    if given.at_least:
        from fencing_sdk.recipes.jobs import check_at_least_for

        check_at_least_for(given.at_least)
        if given.wait != 0:
            msg = "--at-least goes without --wait: a command that waited would do the work of one tick twice"
            raise ConfigurationError(msg)
    if len(ways) > 1:
        msg = f"{' and '.join(ways)} are different ways to hold a lock; choose one"
        raise ConfigurationError(msg)
    if ways and given.at_least:
        msg = f"--at-least goes without {ways[0]}: it keeps a lock that one command at a time may hold"
        raise ConfigurationError(msg)
    job = CommandRun(
        command,
        given.on_loss,
        given.at_least,
        given.at_least_on,
        permits=given.permits,
        shared=given.shared,
        exclusive=given.exclusive,
        metrics_file=given.metrics_file,
        pass_url=given.pass_url,
        quiet=given.quiet,
        verbose=given.verbose,
        ticket=given.ticket,
    )
    times = {"ttl": given.ttl, "wait": given.wait, "max_hold": given.max_hold}
    return run_job(job, lock, where=given.where, label=given.label, **times)


def _check_goes_with_ticket(given: Namespace, words: Sequence[str], arguments: Sequence[str]) -> None:
    if "--" not in arguments or [*words] != [*arguments[arguments.index("--") + 1 :]]:
        msg = "--ticket has the name of the lock; write: fencing run --ticket FILE -- COMMAND"
        raise ConfigurationError(msg)
    ways = {"--wait": given.wait != 0, "--at-least": given.at_least, "--permits": given.permits is not None}
    ways |= {"--shared": given.shared, "--exclusive": given.exclusive}
    if chosen := [way for way, given in ways.items() if given]:
        msg = f"--ticket goes without {chosen[0]}: its lock is held already, in the way in which it was taken"
        raise ConfigurationError(msg)


def _run_arguments() -> Arguments:
    from fencing_sdk.cli.run import OnLoss

    words = {"LOCK": "The work that only one may do at a time, such as nightly-report.", "COMMAND": "Put -- before it."}
    parser = Arguments(run, "run LOCK [OPTIONS] -- COMMAND [ARGUMENT ...]", words)
    parser.store()
    parser.duration("--ttl", "The time after which others get the lock if this machine dies. Default: 15s.", 15.0)
    about = "How long to wait for another holder, and for a store that is away. Or: forever. Default: 0s."
    parser.duration("--wait", about, 0.0, forever=True)
    about = "The time after which the lease ends although the command still runs. Default: never."
    parser.duration("--max-hold", about)
    about = (
        "The time from the start for which the lock stays taken, although the command has ended and whatever becomes "
        "of this machine. For jobs that several machines start at the same time: half of the interval. Goes without "
        "--wait."
    )
    parser.duration("--at-least", about, 0.0)
    about = (
        "Whether the command keeps the lock for --at-least only after a success (exit code 0), so that another machine "
        "may take over from a run that failed, or after any end. Default: success."
    )
    parser.option("--at-least-on", about, choices=("success", "any"), default="success")
    about = (
        "What to do with the command when the lease is lost: SIGTERM and soon SIGKILL, SIGKILL at once, or only a "
        "warning. Default: term."
    )
    parser.option("--on-loss", about, choices=get_args(OnLoss), default="term")
    about = "What others see when they look up the holder. Default: host, process id, name of the command, start."
    parser.option("--label", about)
    about = "How many commands may hold the lock at the same time, each with a number of its own."
    parser.option("--permits", about, type=parse_number)
    parser.flag("--shared", "Hold the lock together with all others who share it, and with no one else.")
    parser.flag("--exclusive", "Hold the lock alone, in one line with those who share it.")
    about = (
        "A file for the textfile collector of node_exporter: start, end, exit code, last success. It ends with .prom."
    )
    parser.option("--metrics-file", about, type=Path, metavar="FILE")
    about = (
        "The file of a ticket, in place of LOCK: the command goes on with its lease, and the file then has the ticket "
        "for the next command."
    )
    parser.option("--ticket", about, metavar="FILE")
    parser.flag("--pass-url", "Let the command know the store of its lock, by FENCING_URL or FENCING_URL_FILE.")
    parser.flag("--quiet", "Say nothing when the lock is taken.")
    parser.flag("--verbose", "Say when the command starts and when it has ended.")
    return parser


def hold(arguments: Sequence[str]) -> int:
    """Take a lock for steps that are processes of their own: no process carries it.

    The same holder again renews it, or takes it anew if it was lost. Prints
    FENCING_TOKEN, FENCING_HOLDER and FENCING_DEADLINE, a variable on each line.
    Exit codes: 0 it is held, 75 another holder has it, 69 the store cannot be used,
    74 the ticket cannot be written, 2 wrong usage.
    """
    words = {"LOCK": "The work that only one may do at a time, such as deploy."}
    parser = Arguments(hold, "hold LOCK (--holder ID | --ticket FILE) [OPTIONS]", words)
    parser.duration("--ttl", "The time for which it stays taken without a renewal. Default: 10m.", 600.0)
    parser.duration("--wait", "How long to wait for another holder. Or: forever. Default: 0s.", 0.0, forever=True)
    parser.option("--label", "What others see. Default: the holder or the ticket, and the host.")
    given, lock = _by_ticket(parser, arguments, least=1)
    return lock.hold(ttl=given.ttl, wait=given.wait, label=given.label)


def renew(arguments: Sequence[str]) -> int:
    """Renew a lock that hold has taken: also the question whether it is held still.

    Exit codes: 0 it is held, 76 it is not, 69 the store cannot be used and the lock
    is held until the deadline that was printed last, 75 another command uses the
    ticket, 2 wrong usage.
    """
    parser = Arguments(renew, "renew [LOCK] (--holder ID | --ticket FILE) [OPTIONS]", _HELD)
    parser.duration("--ttl", "The time for which it stays taken from now on. Default: as before.")
    given, lock = _by_ticket(parser, arguments)
    return lock.renew(ttl=given.ttl)


def release(arguments: Sequence[str]) -> int:
    """Give back a lock that hold has taken, and remove its ticket.

    Exit codes: 0 it was given back, or was over before, 69 the store cannot be used
    and the lock is free after its deadline, 75 another command uses the ticket, 2
    wrong usage.
    """
    parser = Arguments(release, "release [LOCK] (--holder ID | --ticket FILE) [OPTIONS]", _HELD)
    return _by_ticket(parser, arguments)[1].release()


_HELD = {"LOCK": "Its name. With --ticket it may be left out."}


def _by_ticket(parser: Arguments, arguments: Sequence[str], *, least: int = 0) -> tuple[Namespace, DetachedLock]:
    """Read *arguments*, of which these are common to the three commands."""
    from fencing_sdk.cli.detached import DetachedLock

    parser.store()
    about = "Who holds the lock. Commands of this user on this machine with the same ID are one holder."
    parser.option("--holder", about, metavar="ID")
    about = (
        "The file of the ticket, for steps that share it. It is a secret: who can read it holds the lock. Or - for "
        "standard output of hold, and standard input of the others."
    )
    parser.option("--ticket", about, metavar="FILE")
    parser.flag("--json", "Print one object of JSON. Times are in seconds.")
    parser.flag("--quiet", "Print nothing about the lock. The exit code says it.")
    given, words = parser.read(arguments, least=least, most=1)
    place = {"ticket": given.ticket, "holder": given.holder, "where": given.where}
    return given, DetachedLock(next(iter(words), None), **place, as_json=given.json, quiet=given.quiet)


def init(arguments: Sequence[str]) -> int:
    """Create the tables of a store that has some, such as PostgreSQL, before the first lock.

    Without this, the first lock creates them, if its role may. With it, that role
    needs no right to create anything: see the page of the store. A quorum of Redis
    servers is founded by this command alone; run it again when a server has lost
    its data.
    """
    from fencing_sdk.cli.operate import prepare

    parser = Arguments(init, "init [OPTIONS]", {})
    parser.store()
    parser.flag("--sql", "Print the statements for your own migration, and do not connect.")
    given, _ = parser.read(arguments)
    return prepare(given.where, sql=given.sql)


def doctor(arguments: Sequence[str]) -> int:
    """Report what this machine and this store can promise, and what to change.

    Measures pauses and renewals, looks at the settings of the store, and takes,
    hands on and releases a scratch lock. Exit codes: 0 nothing worse than a note,
    1 an error was found, or the store cannot be used, 3 a warning, 2 wrong usage.
    """
    parser = Arguments(doctor, "doctor [OPTIONS]", {})
    parser.store()
    parser.duration("--for", "How long to measure. The longer, the rarer the pauses that are seen. Default: 5s.", 5.0)
    parser.duration("--ttl", "The ttl of the locks in use. Default: 15s.", 15.0)
    parser.flag("--json", "Print one JSON object.")
    given, _ = parser.read(arguments)
    from fencing_sdk.cli.doctor import run_doctor

    return run_doctor(given.where, over=vars(given)["for"], ttl=given.ttl, as_json=given.json)


_NAME = {"LOCK": "Its name, with the namespace of the application, if there is one: app:nightly."}
_PATTERN = {"PATTERN": "A shell pattern for names, such as 'report/*'. Quote it."}


def ls(arguments: Sequence[str]) -> int:
    """List the locks that are held, with their holders."""
    from fencing_sdk.cli.operate import list_locks

    parser = Arguments(ls, "ls [PATTERN] [OPTIONS]", _PATTERN)
    parser.store()
    parser.flag("--json", "Print a line of JSON for each holder, of all locks. Times are in seconds.")
    parser.option("--limit", "The most rows of the table. 0 shows all. Default: 500.", type=parse_number, default=500)
    given, words = parser.read(arguments, most=1)
    return list_locks(*words or ["*"], where=given.where, as_json=given.json, limit=given.limit)


def show(arguments: Sequence[str]) -> int:
    """Show who holds a lock, since when and for how long, and who waits for it."""
    from fencing_sdk.cli.operate import show_lock

    parser = Arguments(show, "show LOCK [OPTIONS]", _NAME)
    parser.store()
    parser.flag("--json", "Print one object of JSON. Times are in seconds.")
    given, words = parser.read(arguments, least=1, most=1)
    return show_lock(*words, where=given.where, as_json=given.json)


def break_(arguments: Sequence[str]) -> int:
    """Take a lock away from its holder: its work is cancelled, with your reason.

    The store compares the token, so that a later holder is never hit, and the next
    token is higher. Exit codes: 0 it was taken away, 1 it was not, 2 wrong usage,
    69 the store cannot be used.
    """
    from fencing_sdk.cli.operate import Breaking

    parser = Arguments(break_, "break LOCK --reason REASON [OPTIONS]", _NAME)
    parser.store()
    about = "The reason that the holder finds in its error and its log. Up to 200 characters."
    parser.option("--reason", about, required=True)
    about = "The token of the holder, as ls and show print it. Default: that of the only holder."
    parser.option("--token", about, type=parse_number)
    parser.flag("--yes", "Do not ask.")
    parser.flag("--json", "Print the outcome as an object of JSON. Goes with --yes.")
    given, words = parser.read(arguments, least=1, most=1)
    breaking = Breaking(name=words[0], reason=given.reason, token=given.token, yes=given.yes, as_json=given.json)
    return breaking.run(given.where)


def demo(arguments: Sequence[str]) -> int:
    """Freeze a worker that holds a lock, and see what its late write does without and with a guard.

    Real processes, a real SIGSTOP, two SQLite files in a temporary folder; no
    server, about ten seconds. The exit code is 0 only if the run showed what it
    says.
    """
    parser = Arguments(demo, "demo [OPTIONS]", {})
    parser.option("--svg", "Draw the run into this file.", type=Path, metavar="FILE")
    given, _ = parser.read(arguments)
    from fencing_sdk.cli.demo import show

    return show(console(), given.svg)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "hold": hold,
    "renew": renew,
    "release": release,
    "init": init,
    "doctor": doctor,
    "ls": ls,
    "show": show,
    "break": break_,
    "demo": demo,
}
