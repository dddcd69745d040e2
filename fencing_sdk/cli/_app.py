"""The commands and their arguments, and what an error of the user's looks like."""
# ruff: noqa: D417  (the options that name a store are described once, at StoreOptions)

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter, Token

from fencing_sdk import __version__
from fencing_sdk.cli._durations import parse_duration
from fencing_sdk.cli._job import Job, OnLoss
from fencing_sdk.cli._store import StoreOptions
from fencing_sdk.cli._streams import Output, OutputClosedError, escape_what_cannot_be_shown, say, silence
from fencing_sdk.cli.run import Exit, run_job
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.recipes.jobs import AtLeastOn, check_at_least_for

app = App(
    name="fencing",
    version=__version__,
    help="Distributed locks that stay harmless when they are lost.",
)


def run_app(arguments: Sequence[str]) -> int:
    """Run the command in *arguments*; return its exit code."""
    escape_what_cannot_be_shown()
    app.console = Output()
    try:
        code: int | None = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ConfigurationError) as error:
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
    return code or 0


def _duration(_hint: object, tokens: Sequence[Token]) -> float:
    return parse_duration(tokens[0].value)  # a ValueError becomes an error of cyclopts that names the option


def _patience(_hint: object, tokens: Sequence[Token]) -> float | None:
    return None if tokens[0].value == "forever" else parse_duration(tokens[0].value, also=", or: forever")


# With a leading hyphen, so that the message to `--ttl -3s` is about the value, and not that there is none.
_Duration = Annotated[float, Parameter(converter=_duration, allow_leading_hyphen=True)]
_Where = Annotated[StoreOptions, Parameter(name="*")]
_DEFAULT = StoreOptions()


@app.command(usage="Usage: fencing run LOCK [OPTIONS] -- COMMAND [ARGUMENT ...]")
def run(
    lock: str,
    /,
    *command: str,
    where: _Where = _DEFAULT,
    ttl: _Duration = 15.0,
    wait: Annotated[float | None, Parameter(converter=_patience, allow_leading_hyphen=True)] = 0.0,
    max_hold: _Duration | None = None,
    at_least: _Duration = 0.0,
    at_least_on: AtLeastOn = "success",
    on_loss: OnLoss = "term",
    metadata: str | None = None,
    permits: int | None = None,
    shared: Annotated[bool, Parameter(negative="")] = False,
    exclusive: Annotated[bool, Parameter(negative="")] = False,
    metrics_file: Path | None = None,
    pass_url: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    verbose: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run a command while holding a lock.

    The command finds FENCING_TOKEN, FENCING_HOLDER, FENCING_LOCK and FENCING_DEADLINE in its environment. Its exit
    code is passed through. Otherwise: 75 the lock is taken and nothing was run, 76 the lease was
    lost and the command was stopped, 69 the store cannot be used, 2 wrong usage.

    Times are durations such as 90s, 5m or 1h, or plain seconds.

    Args:
        lock: What only one may do at a time, such as nightly-report.

        command: The command and its arguments. Put -- before it.

        ttl: The time after which others get the lock if this machine dies.

        wait: How long to wait for another holder, and for a store that is away. Or: forever.

        max_hold: The time after which the lease ends although the command still runs. Default: never.

        at_least: The time from the start for which the lock stays taken, although the command has ended and
            whatever becomes of this machine. For jobs that several machines start at the same time: half of the
            interval. Goes without --wait.

        at_least_on: Whether only a success, exit code 0, keeps the lock for --at-least, so that another machine may
            take over from a run that failed, or any end of the command.

        on_loss: What happens to the command when the lease is lost: SIGTERM and soon SIGKILL,
            SIGKILL at once, or only a warning.

        metadata: What others see when they look up the holder. Default: host, process id, name of the command, start.

        permits: So many commands hold the lock at the same time, each a number of its own.

        shared: Hold the lock together with all others who share it, and with no one else.

        exclusive: Hold the lock alone, in one line with those who share it.

        metrics_file: A file for the textfile collector of node_exporter: start, end, exit code, last success. It ends
            with .prom.

        pass_url: Let the command know the store of its lock, by FENCING_URL or FENCING_URL_FILE.

        quiet: Say nothing when the lock is taken.

        verbose: Say when the command starts and when it has ended.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    if not command or not command[0]:
        problem = "the name of the command is empty" if command else "no command to run"
        msg = f"{problem}; write: fencing run LOCK -- COMMAND"
        raise ConfigurationError(msg)
    if at_least:
        check_at_least_for(at_least)
        if wait != 0:
            msg = "--at-least goes without --wait: a command that waited would do the work of one tick twice"
            raise ConfigurationError(msg)
    ways = [
        way
        for way, asked in (("--permits", permits is not None), ("--shared", shared), ("--exclusive", exclusive))
        if asked
    ]
    if len(ways) > 1:
        msg = f"{' and '.join(ways)} are different ways to hold a lock; choose one"
        raise ConfigurationError(msg)
    if ways and at_least:
        msg = f"--at-least goes without {ways[0]}: it keeps a lock that one command at a time may hold"
        raise ConfigurationError(msg)
    job = Job(
        command,
        on_loss,
        at_least,
        at_least_on,
        permits=permits,
        shared=shared,
        exclusive=exclusive,
        metrics_file=metrics_file,
        pass_url=pass_url,
        quiet=quiet,
        verbose=verbose,
    )
    return run_job(job, lock, where=where, ttl=ttl, wait=wait, max_hold=max_hold, metadata=metadata)


@app.command
def init(*, where: _Where = _DEFAULT, sql: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Create the tables of a store that has some, such as PostgreSQL, before the first lock.

    Without this, the first lock creates them, if its role may. With it, that role needs no right to
    create anything: see the page of the store. A quorum of Redis servers is founded by this command
    alone; run it again when a server has lost its data.

    Args:
        sql: Print the statements for your own migration, and do not connect.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.init import prepare  # noqa: PLC0415  (what cron starts every minute loads no more than run)

    return prepare(where, sql=sql)


@app.command
def doctor(
    *,
    where: _Where = _DEFAULT,
    over: Annotated[float, Parameter(name="--for", converter=_duration, allow_leading_hyphen=True)] = 5.0,
    ttl: _Duration = 15.0,
    json: Annotated[bool, Parameter(negative="")] = False,
    svg: Path | None = None,
) -> int:
    """Tell what this machine and this store can promise, and what to change.

    Measures pauses and renewals, looks at the settings of the store, and takes, hands on and gives
    back a scratch lock. Exit codes: 0 nothing worse than a note, 1 an error was found, or the store
    cannot be used, 3 a warning, 2 wrong usage.

    Args:
        over: How long to measure. The longer, the rarer the pauses that are seen.

        ttl: The ttl of the locks in use.

        json: Print one JSON object.

        svg: Draw what is printed into this file.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.doctor import run_doctor  # noqa: PLC0415  (what cron starts every minute loads no more than run)

    return run_doctor(where, over=over, ttl=ttl, as_json=json, svg=svg)


@app.command
def ls(
    pattern: str = "*",
    /,
    *,
    where: _Where = _DEFAULT,
    json: Annotated[bool, Parameter(negative="")] = False,
    limit: int = 500,
) -> int:
    """List the locks that are held, with their holders.

    Args:
        pattern: As a shell matches file names, such as 'report/*'. Quote it.

        json: Print a line of JSON for each holder, of all locks. Times are in seconds.

        limit: The most rows of the table. 0 shows all.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.operate import list_locks  # noqa: PLC0415  (as above)

    return list_locks(pattern, Output(), where=where, as_json=json, limit=limit)


@app.command
def show(lock: str, /, *, where: _Where = _DEFAULT, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show who holds a lock, since when and for how long, and who waits for it.

    Args:
        lock: Its name, with the namespace of the application, if there is one: app:nightly.

        json: Print one object of JSON. Times are in seconds.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.operate import show_lock  # noqa: PLC0415  (as above)

    return show_lock(lock, Output(), where=where, as_json=json)


@app.command(name="break")
def break_(
    lock: str,
    /,
    *,
    reason: str,
    token: int | None = None,
    yes: Annotated[bool, Parameter(negative="")] = False,
    where: _Where = _DEFAULT,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Take a lock away from its holder, whose work is cancelled and told the reason.

    The store compares the token, so that a later holder is never hit, and the next token is higher. Exit codes:
    0 it was taken away, 1 it was not, 2 wrong usage, 69 the store cannot be used.

    Args:
        lock: Its name, with the namespace of the application, if there is one: app:nightly.

        reason: What the holder reads in its error and its log. Up to 200 characters.

        token: The token of the holder, as ls and show print it. Default: that of the only holder.

        yes: Do not ask.

        json: Print what became of it as an object of JSON. Goes with --yes.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.operate import Breaking  # noqa: PLC0415  (as above)

    return Breaking(name=lock, reason=reason, token=token, yes=yes, as_json=json).run(Output(), where)


@app.command
def top(pattern: str = "*", /, *, where: _Where = _DEFAULT, every: _Duration = 2.0, svg: Path | None = None) -> int:
    """Watch the locks that are held, on a terminal: holders, waiters, the time that is left. Press q to quit.

    Args:
        pattern: As a shell matches file names, such as 'report/*'. Quote it.

        every: The time between two looks. Each is one call to the store for every 200 locks, up to 1,000 of them.

        svg: Draw one look into this file, and end.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    from fencing_sdk.cli.top import watch  # noqa: PLC0415  (as above)

    return watch(pattern, where=where, every=every, svg=svg)


@app.command
def demo(*, svg: Path | None = None) -> int:
    """Freeze a worker that holds a lock, and see what its late write does without and with a guard.

    Real processes, a real SIGSTOP, two SQLite files in a temporary folder; no server, about ten
    seconds. The exit code is 0 only if the run showed what it says.

    Args:
        svg: Draw the run into this file.

    Raises:
        ConfigurationError: a file cannot be written, which is told before the run.
    """
    from fencing_sdk.cli.demo import show  # noqa: PLC0415  (what cron starts every minute loads no pictures)

    return show(Output(), svg)


@app.command
def timeline(recording: Path, /, *more: Path, svg: Path) -> int:
    """Draw recordings, made with FENCING_RECORD=run.jsonl on one machine, as an SVG picture.

    Args:
        recording: A file of JSON lines.

        more: Recordings of other processes of the same machine and run.

        svg: The file to write.
    """
    from fencing_sdk.cli.timeline import draw_recordings  # noqa: PLC0415  (as above)

    draw_recordings((recording, *more), svg)
    return 0


@app.command
def check(
    recording: Path,
    /,
    *more: Path,
    least: int = 25,
    require: Annotated[list[str] | None, Parameter(negative="")] = None,
) -> int:
    """Look for broken promises in recordings, made with FENCING_RECORD=run.jsonl on one machine.

    Exit codes: 0 nothing was broken, 1 a promise was, 3 too little was recorded to tell, 2 wrong usage.

    Args:
        recording: A file of JSON lines.

        more: Recordings of other processes of the same machine and run.

        least: Acquisitions below which a recording shows nothing.

        require: A promise, P1 to P8, without which there is no pass. May be repeated. Default: P1 and P4.

    Raises:
        ConfigurationError: a file cannot be read, or an argument cannot work.
    """
    from fencing_sdk.cli.check import PLAIN, check_recordings  # noqa: PLC0415  (as above)

    return check_recordings((recording, *more), Output(), least=least, require=PLAIN if require is None else require)
