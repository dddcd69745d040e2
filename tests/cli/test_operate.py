"""`fencing ls`, `show`, `break` and `top`, as a person and as a script use them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator

import pytest
from command_line import Fencing
from rich.cells import cell_len
from terminal import Open, Terminal, at_a_terminal

from fencing_sdk import LeaseLostError, LockClient, connect

__all__ = ["at_a_terminal"]


@pytest.fixture
async def locks(fencing: Fencing) -> AsyncIterator[LockClient]:
    fencing.environment["FENCING_URL"] = f"sqlite:///{fencing.folder}/locks.db"
    async with connect(fencing.environment["FENCING_URL"]) as client:
        yield client


async def test_ls_prints_a_row_for_each_holder_on_80_columns(fencing: Fencing, locks: LockClient):
    async with locks.lock("report/7", metadata="worker 3") as lease, locks.lock("seats/1", metadata=""):
        done = await asyncio.to_thread(fencing, "ls")
        assert (done.returncode, done.stderr) == (0, "")
        head, row, other = done.stdout.splitlines()
        assert head.split() == ["NAME", "HOLDER", "TOKEN", "HELD", "LEFT", "WAIT", "METADATA"]
        assert row.split()[:3] == ["report/7", lease.holder, str(lease.token)]
        assert row.rstrip().endswith("worker 3")
        assert other.startswith("seats/1 ")
        assert max(map(len, done.stdout.splitlines())) <= 80
        chosen = await asyncio.to_thread(fencing, "ls", "seats/*")
        assert [line.split()[0] for line in chosen.stdout.splitlines()] == ["NAME", "seats/1"]
        few = await asyncio.to_thread(fencing, "ls", "--limit", "1")
        assert len(few.stdout.splitlines()) == 2
        assert "there is more than these 1" in few.stderr


async def test_at_a_terminal_long_names_are_folded_and_long_metadata_is_cut(
    at_a_terminal: Open, fencing: Fencing, locks: LockClient
):
    about = json.dumps({"host": "worker-3.eu-west.example", "pid": 4711, "command": "report", "start": "2026-11-23"})
    name = "tenants/" + "0123456789" * 5
    async with locks.lock("nightly", metadata=about) as lease, locks.lock(name, metadata=about):
        terminal = at_a_terminal("ls")
        assert await asyncio.to_thread(terminal.ends) == 0
        lines = plain(terminal.seen + terminal.rest()).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[1].split()[:3] == ["nightly", lease.holder, str(lease.token)]
        assert lines[1].rstrip().endswith("…")
        assert "".join(line[:16].strip() for line in lines[2:]).startswith("tenants/01")
        assert "".join(line.split()[0] for line in lines[2:]) == name


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
async def test_in_a_pipe_each_holder_has_one_line_with_the_whole_name(
    fencing: Fencing, locks: LockClient, forced: dict[str, str]
):
    """Also where Rich takes the pipe for a terminal, as the systems of CI ask for."""
    fencing.environment |= forced
    name, about = "tenants/" + "0123456789" * 20, "worker 3, " * 20
    async with locks.lock("nightly") as lease, locks.lock(name, metadata=about) as other:
        done = await asyncio.to_thread(fencing, "ls")
        _, short, long = done.stdout.splitlines()
        assert short.split()[:3] == ["nightly", lease.holder, str(lease.token)]
        assert long.split()[:3] == [name, other.holder, str(other.token)]
        assert long.rstrip().endswith(about.rstrip())


async def test_in_a_pipe_one_long_text_makes_no_other_line_longer(fencing: Fencing, locks: LockClient):
    name, about = "z" * 500, "x" * 1000
    async with (
        locks.lock("a/7", metadata="") as a,
        locks.lock("b/日本", metadata="1") as b,
        locks.lock(name, metadata=about),
    ):
        lines = (await asyncio.to_thread(fencing, "ls")).stdout.splitlines()
        assert lines[3].startswith(f"{name}  ")
        assert lines[3].endswith(f"  {about}")
        assert [line for line in lines if line.endswith(" ")] == []
        assert max(map(len, lines[:3])) < 150
        before = [line.partition(lease.holder)[0] for line, lease in zip(lines[1:3], (a, b), strict=True)]
        assert cell_len(before[0]) == cell_len(before[1]) == lines[0].index("HOLDER")


async def test_ls_tells_when_nothing_is_held(fencing: Fencing, locks: LockClient):
    done = await asyncio.to_thread(fencing, "ls", "report/*")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "fencing: nothing is held that matches 'report/*'\n"


async def test_ls_and_show_as_json_are_objects_with_seconds(fencing: Fencing, locks: LockClient):
    async with locks.lock("report/7", metadata="worker 3") as lease:
        waiter = asyncio.create_task(locks.lock("report/7").acquire())
        while not await locks.waiters("report/7"):  # noqa: ASYNC110  (it is in the store)
            await asyncio.sleep(0.01)
        (line,) = (await asyncio.to_thread(fencing, "ls", "--json")).stdout.splitlines()
        row = json.loads(line)
        assert (row["name"], row["token"], row["holder"]) == ("report/7", lease.token, lease.holder)
        assert (row["mode"], row["permit"], row["metadata"]) == ("lock", None, "worker 3")
        assert 0 < row["remaining"] <= 15
        shown = json.loads((await asyncio.to_thread(fencing, "show", "report/7", "--json")).stdout)
        assert [holder["token"] for holder in shown["holders"]] == [lease.token]
        assert len(shown["waiting"]) == 1
        told = (await asyncio.to_thread(fencing, "show", "report/7")).stdout
        assert "worker 3" in told
        assert f"waiter 1  {shown['waiting'][0]['holder']}" in told
        waiter.cancel()
        await asyncio.wait([waiter])


async def test_a_text_of_others_cannot_move_the_cursor(fencing: Fencing, locks: LockClient):
    async with locks.lock("[bold]a", metadata="\x1b[2Jgone\nnext"):
        for command in (["ls"], ["show", "[bold]a"]):
            told = (await asyncio.to_thread(fencing, *command)).stdout
            assert "\x1b" not in told
            assert "[bold]a" in told


async def test_show_tells_that_a_lock_is_free(fencing: Fencing, locks: LockClient):
    done = await asyncio.to_thread(fencing, "show", "report/7")
    assert (done.returncode, done.stdout) == (0, "report/7\n  free\n")


async def test_break_cancels_the_holder_who_reads_the_reason(fencing: Fencing, locks: LockClient):
    async def work() -> None:
        async with locks.lock("report/7"):
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    while (holder := await locks.inspect("report/7")) is None:  # noqa: ASYNC110  (as above)
        await asyncio.sleep(0.01)
    done = await asyncio.to_thread(fencing, "break", "report/7", "--reason", "it hangs", "--yes")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"fencing: 'report/7' was taken away from {holder.holder} (token {holder.token})\n"
    with pytest.raises(LeaseLostError, match="it hangs"):
        await working
    again = await asyncio.to_thread(fencing, "break", "report/7", "--reason", "it hangs", "--yes", "--json")
    assert (again.returncode, json.loads(again.stdout)["broken"]) == (1, False)


async def test_break_with_a_token_hits_no_other_holder(fencing: Fencing, locks: LockClient):
    former = await locks.lock("report/7").acquire()
    token = int(former.token)
    await former.release()
    async with locks.lock("report/7") as lease:
        done = await asyncio.to_thread(
            fencing, "break", "report/7", "--reason", "it hangs", "--yes", "--token", str(token)
        )
        assert done.returncode == 1
        assert "is not held with token" in done.stderr
        await lease.renew()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["break", "a", "--reason", "x"], "here is no terminal; add --yes"),
        (["break", "a", "--yes"], "reason"),
        (["break", "a", "--yes", "--reason", ""], "reason must be"),
        (["break", "a", "--yes", "--reason", "x", "--token", "-1"], "token"),
        (["top"], "needs a terminal"),
        (["ls", "--limit", "-1"], "--limit must be"),
        (["ls", ""], "pattern must not be empty"),
        (["show", ""], "name must not be empty"),
        (["ls", "--url", "memory://"], "known only inside their process"),
    ],
)
def test_what_cannot_work_is_wrong_usage(fencing: Fencing, arguments: list[str], problem: str):
    done = fencing(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "url"),
    [
        (["ls"], "redis://user:secret@127.0.0.1:1"),
        (["show", "a"], "redis://user:secret@127.0.0.1:1"),
        (["break", "a", "--reason", "x", "--yes"], "redis://user:secret@127.0.0.1:1"),
        (["ls"], "kahuna://127.0.0.1:1"),
    ],
)
def test_a_store_that_does_not_answer_is_told_on_one_line(fencing: Fencing, command: list[str], url: str):
    done = fencing(*command, "--url", url)
    assert done.returncode == 69
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


async def test_break_asks_at_a_terminal_and_no_is_the_default(at_a_terminal: Open, locks: LockClient):
    lease = await locks.lock("report/7", metadata="worker 3").acquire()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    assert "worker 3" in terminal.seen
    assert "cancelled with: revoked: it hangs" in terminal.seen
    terminal.type("\n")
    assert await asyncio.to_thread(terminal.ends) == 1
    await lease.renew()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    terminal.type("y\n")
    assert await asyncio.to_thread(terminal.ends) == 0
    assert await locks.inspect("report/7") is None
    with pytest.raises(LeaseLostError):
        await lease.renew()


async def test_break_that_is_interrupted_at_the_question_ends_at_once_and_takes_nothing_away(
    at_a_terminal: Open, locks: LockClient
):
    lease = await locks.lock("report/7").acquire()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    terminal.type("\x03")
    assert await asyncio.to_thread(terminal.ends) == 130
    assert "nothing was done" in terminal.rest()
    await lease.renew()
    await lease.release()


def test_top_shows_what_is_held_until_q_is_pressed(at_a_terminal: Open, fencing: Fencing):
    holder = fencing.start("run", "nightly/1", "--", "sleep", "60")
    terminal = at_a_terminal("top", "--every", "300ms")
    terminal.shows("nightly/1")
    assert "calls/s" in plain(terminal.seen)
    terminal.type("q")
    assert terminal.ends() == 0
    assert "\x1b[?1049l" in terminal.rest(), "the screen from before is shown again"
    holder.terminate()


async def test_top_fits_the_terminal_whose_size_changes(at_a_terminal: Open, locks: LockClient):
    held = [await locks.lock(f"tenants/{number:02}/" + "x" * 60, ttl=60).acquire() for number in range(30)]
    terminal = at_a_terminal("top", "--every", "300ms")
    for columns, lines in ((80, 24), (50, 12), (100, 30)):
        terminal.resize(columns, lines)
        expected = (columns, lines, lines - 5, f"... and {30 - (lines - 5)} more")
        screens = []
        while expected not in screens:  # the first ones may have been drawn before, or meanwhile
            assert len(screens) < 50, screens
            rows = await asyncio.to_thread(next_screen, terminal)
            named = sum(row.startswith("tenants/") for row in rows)
            screens.append((max(map(len, rows), default=0), len(rows), named, rows[-1].rstrip() if rows else ""))
    terminal.type("q")
    assert await asyncio.to_thread(terminal.ends) == 0
    for lease in held:
        await lease.release()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


HOME = "\x1b[H"


def next_screen(terminal: Terminal) -> list[str]:
    """The rows of the next screen that is drawn as a whole."""
    terminal.shows(HOME)
    terminal.seen = terminal.seen.partition(HOME)[2]
    terminal.shows(HOME)
    drawn, _, rest = terminal.seen.partition(HOME)
    terminal.seen = HOME + rest
    return plain(drawn).splitlines()


def test_top_tells_that_the_store_is_down_and_ends(at_a_terminal: Open):
    terminal = at_a_terminal("top", "--url", "redis://user:secret@127.0.0.1:1")
    assert terminal.ends() == 69
    assert "127.0.0.1" in terminal.rest()
    assert "secret" not in terminal.seen


def test_an_interrupt_ends_top_in_order(at_a_terminal: Open):
    terminal = at_a_terminal("top", "--every", "300ms")
    terminal.shows("0 held")
    terminal.type("\x03")
    assert terminal.ends() == 0
    assert "\x1b[?1049l" in terminal.rest(), "the screen from before is shown again"


async def test_top_draws_one_look_without_a_terminal(fencing: Fencing, locks: LockClient):
    async with locks.lock("report/7"):
        done = await asyncio.to_thread(fencing, "top", "--svg", "top.svg")
    assert (done.returncode, done.stderr) == (0, "")
    picture = fencing.path("top.svg").read_text().replace("&#160;", " ")
    assert "report/7" in picture
    assert "1 held" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
