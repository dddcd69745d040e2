"""`fencing run` at a terminal: one Ctrl-C is one signal, and the command may read what is typed."""

import sys

import pytest
from command_line import Fencing, alive, until
from terminal import Open, at_a_terminal

__all__ = ["at_a_terminal"]

COUNT_INTERRUPTS = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
if "ask" in sys.argv: input("name? ")
print("ready", flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.3)
print(len(seen), "interrupt", flush=True)
"""


@pytest.mark.parametrize("ask", [False, True], ids=["before", "after"])
def test_ctrl_c_reaches_the_command_once_before_and_after_it_has_the_terminal(at_a_terminal: Open, ask: bool):
    terminal = at_a_terminal("run", "job", "--", sys.executable, "-c", COUNT_INTERRUPTS, *(["ask"] if ask else []))
    if ask:
        terminal.shows("name? ")
        terminal.type("Ada\n")
    terminal.shows("ready")
    terminal.type("\x03")
    terminal.shows("1 interrupt")
    assert terminal.ends() == 0


def test_a_command_may_read_from_the_terminal(at_a_terminal: Open):
    terminal = at_a_terminal("run", "job", "--", "sh", "-c", 'echo ask; read name; echo "hello $name"; exit 4')
    terminal.shows("ask")
    terminal.type("Ada\n")
    terminal.shows("hello Ada")
    assert terminal.ends() == 4


STOP_AND_GO_ON = """
import pathlib, os, sys, time
pathlib.Path("command.pid").write_text(f"{os.getpid()}\\n")
if "ask" in sys.argv: input("name? ")
print("ready", flush=True)
while not pathlib.Path("may.go.on").exists(): time.sleep(0.01)
pathlib.Path("went.on").touch()
input("over")
"""


@pytest.mark.parametrize("ask", [False, True], ids=["before", "after"])
def test_ctrl_z_stops_both_and_the_command_goes_on_with_its_supervisor(
    fencing: Fencing, at_a_terminal: Open, ask: bool
):
    terminal = at_a_terminal("run", "job", "--", sys.executable, "-c", STOP_AND_GO_ON, *(["ask"] if ask else []))
    if ask:
        terminal.shows("name? ")
        terminal.type("Ada\n")
    terminal.shows("ready")
    terminal.type("\x1a")
    terminal.is_stopped()
    fencing.path("may.go.on").touch()
    assert "over" not in terminal.seen
    terminal.go_on()
    terminal.shows("over")
    terminal.type("\n")
    assert terminal.ends() == 0


def test_a_command_does_not_go_on_after_a_stop_that_outlived_its_lease(fencing: Fencing, at_a_terminal: Open):
    terminal = at_a_terminal("run", "job", "--ttl", "3", "--", sys.executable, "-c", STOP_AND_GO_ON)
    terminal.shows("ready")
    terminal.type("\x1a")
    terminal.is_stopped()
    fencing.path("may.go.on").touch()
    assert fencing("run", "job", "--wait", "30", "--", "true").returncode == 0
    terminal.go_on()
    assert terminal.ends() == 76
    until(lambda: not alive(fencing.pid("command.pid")), "the end of the command")
    assert not fencing.path("went.on").exists()
