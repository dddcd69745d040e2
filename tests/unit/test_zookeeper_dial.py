"""How long a server has to accept a connection and a session: little at first, where there is another server."""

from __future__ import annotations

import math
import socket
import ssl
import time

import pytest

from fencing_sdk.backends.zookeeper.connection.dial import Dial
from fencing_sdk.backends.zookeeper.connection.driver import KazooDriver, ZooKeeperSettings
from fencing_sdk.backends.zookeeper.connection.node_ends import NodeEnds


@pytest.fixture
def silent():
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def _tried(dial: Dial, address) -> float:
    """Connect and wait for the first byte of the handshake; return for how long."""
    with dial.create_connection(address, timeout=60.0) as link:
        started = time.monotonic()
        assert dial.select([link], [], [], 60.0) == ([], [], [])
        return time.monotonic() - started


def test_a_server_that_hangs_has_little_time_until_as_many_tries_have_hung(silent):
    dial = Dial(connect_timeout=5.0, first_timeout=0.05, servers=2, tls=None)
    waits = [_tried(dial, silent) for _ in range(4)]
    assert all(wait < 4 for wait in waits), "the whole limit was 5 s"
    assert min(waits[:2]) >= 0.05
    assert min(waits[2:]) >= 0.1, "all may be slow: each gets twice the time"


def test_a_server_that_refuses_at_once_gives_the_next_one_no_more_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    dial = Dial(connect_timeout=5.0, first_timeout=0.05, servers=2, tls=None)
    for _ in range(10):
        with pytest.raises(ConnectionRefusedError):
            dial.create_connection(closed)
    assert dial._limit_of_try() == 0.05


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_address_at_which_nobody_listens_does_not_hide_what_another_one_does(silent, order):
    """A name may have an IPv6 address that its server does not listen at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    dial = Dial(connect_timeout=0.05, first_timeout=0.05, servers=1, tls=ssl.create_default_context)
    for place in order:
        with pytest.raises(OSError, match=r"refused|timed out"):
            dial.create_connection((silent, closed)[place], hostname="localhost")
    assert isinstance(dial.last_error, TimeoutError)


def test_the_limit_is_reached_and_never_passed(silent):
    dial = Dial(connect_timeout=0.12, first_timeout=0.05, servers=1, tls=None)
    assert [_tried(dial, silent) >= least for least in (0.05, 0.1, 0.12)] == [True] * 3
    dial._hangs = 10_000
    assert dial._limit_of_try() == 0.12


def test_a_connection_that_serves_has_the_whole_limit_for_the_rest_of_a_message(silent):
    dial = Dial(connect_timeout=5.0, first_timeout=0.05, servers=3, tls=None)
    _tried(dial, silent)
    dial.serves()
    assert dial._limit_of_try() == 5.0
    assert _tried(dial, silent) < 4, "and the next handshake has little time again"


def test_a_single_server_has_the_whole_limit():
    dial = Dial(connect_timeout=5.0, first_timeout=math.inf, servers=1, tls=None)
    dial._connecting = True
    assert dial._limit_of_try() == 5.0


def test_a_server_that_hung_is_tried_after_all_others_until_it_serves(silent):
    host, port = silent
    settings = ZooKeeperSettings(hosts=[(host, port), (host, 1), (host, 2)], root="/fencing", connect_timeout=1.0)
    driver = KazooDriver(settings, 9.0, None, NodeEnds())
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert len({order[-1][2] for order in orders}) > 1, "the first server is chosen at random"
    _tried(driver._dial, silent)
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert {order[-1][2] for order in orders} == {port}
    driver._dial.serves()
    driver._dial._address = (host, 2)
    driver.hang_up()
    orders = [driver._client._connection._expand_client_hosts() for _ in range(20)]
    assert {order[-1][2] for order in orders} == {2}, "a connection that was silent counts as well"
