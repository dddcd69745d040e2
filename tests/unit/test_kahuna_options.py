"""What may be written in a URL or passed to the backend, and which node is asked first. Nothing is sent here."""

import ssl
from pathlib import Path

import pytest

from fencing_sdk._http.endpoints import Endpoints
from fencing_sdk.backends._shared.unanswered_requests import UnansweredRequests
from fencing_sdk.backends.kahuna import KahunaBackend, from_url
from fencing_sdk.backends.kahuna.options import read_nodes
from fencing_sdk.errors import ConfigurationError


def origins(texts: list[str], *, tls: bool = False) -> list[str]:
    return sorted(endpoint.origin for endpoint in read_nodes(texts, tls=tls).in_turn())


def test_endpoints_have_default_ports():
    assert origins(["h1", "h2:81", "[::1]", "[::1]:82"]) == [
        "http://[::1]:2070",
        "http://[::1]:82",
        "http://h1:2070",
        "http://h2:81",
    ]
    assert origins(["h1"], tls=True) == ["https://h1:2071"]


def test_an_endpoint_that_is_named_twice_is_one():
    assert origins(["h1:2070", "H1", "h1"]) == ["http://h1:2070"]


@pytest.mark.parametrize(
    "url",
    [
        "kahuna://",
        "kahuna:///",
        "kahuna://h1,",
        "kahuna://,h1",
        "kahuna://h1:",
        "kahuna://h1:0",
        "kahuna://h1:65536",
        "kahuna://h1:x",
        "kahuna://h1 h2",
        "kahuna://[::1",
        "kahuna://[zz]",
        "kahuna://h1/path",
        "kahuna://h1?durability=eternal",
        "kahuna://h1?durability=",
        "kahuna://h1?connections=0",
        "kahuna://h1?connections=x",
        "kahuna://h1?connections=1.5",
        "kahuna://h1?connections=100000",
        "kahuna://h1?connect_timeout=0",
        "kahuna://h1?connect_timeout=nan",
        "kahuna://h1?connect_timeout=x",
        "kahuna://h1?tls=true",
        "kahuna://h1?ca=/etc/ssl/ca.pem",
        "kahuna+https://h1?ssl_context=none",
        "kahuna+https://h1?verify=off",
        "kahuna+https://h1?ca=/",
        "kahuna://h1#h2",
    ],
)
def test_a_url_that_cannot_work_is_refused_when_it_is_read(url: str):
    with pytest.raises(ConfigurationError):
        from_url(url)


@pytest.mark.parametrize(
    "url", ["kahuna://me:s3cret@h1", "kahuna://h1:s3cret", "kahuna://s3cret,h2:0", "kahuna://[s3cret]"]
)
def test_what_may_be_a_password_is_not_repeated(url: str):
    """Kahuna has none, so a URL with one is an error."""
    with pytest.raises(ConfigurationError) as raised:
        from_url(url)
    assert "s3cret" not in f"{raised.value!r} {raised.value.__cause__!r} {raised.value.__context__!r}"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tls", 1),
        ("durability", None),
        ("durability", ["persistent"]),
        ("connect_timeout", True),
        ("connections", True),
        ("connections", 2.0),
        ("ssl_context", True),
        ("ca", "ca.pem"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_refused(option: str, value: object):
    with pytest.raises(ConfigurationError, match=option):
        KahunaBackend(["h1"], **{option: value})


@pytest.mark.parametrize("endpoints", ["h1:2070", [], None, [b"h1"], [None]])
def test_endpoints_of_a_wrong_kind_are_refused(endpoints: object):
    with pytest.raises(ConfigurationError, match="endpoint"):
        KahunaBackend(endpoints)


def test_an_authority_and_a_context_exclude_each_other(tmp_path: Path):
    context = ssl.create_default_context()
    with pytest.raises(ConfigurationError, match="exclude"):
        KahunaBackend(["h1"], tls=True, ca=tmp_path / "ca.pem", ssl_context=context)
    KahunaBackend(["h1"], tls=True, ssl_context=context)


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigurationError, match=r"ca .* cannot be read"):
        from_url(f"kahuna+https://h1?ca={tmp_path}/ca.pem")


def test_certificates_are_checked_unless_a_context_says_otherwise():
    tls = from_url("kahuna+https://h1")._nodes.pool.tls
    assert tls is not None
    assert tls().check_hostname
    assert tls().verify_mode is ssl.CERT_REQUIRED


def test_options_may_stand_in_the_url_or_beside_it():
    backend = from_url("kahuna://h1,h2?durability=ephemeral&connections=8&connect_timeout=0.5")
    assert backend._nodes.pool.connections == 8
    assert backend._nodes.pool.limits.sock_connect == 0.5
    assert from_url("kahuna://h1", connections=8)._nodes.pool.connections == 8


def test_a_node_that_failed_is_asked_last():
    endpoints = read_nodes(["a", "b", "c"], tls=False)
    a, b, c = endpoints.in_turn()
    endpoints.mark_failed(a)
    assert endpoints.in_turn() == (b, c, a)
    endpoints.mark_failed(a)
    assert endpoints.in_turn() == (b, c, a)
    endpoints.mark_failed(b)
    assert endpoints.in_turn() == (c, a, b)


def test_clients_do_not_all_begin_with_the_first_node():
    """Thirty would do so once in 3**29 runs."""
    assert len({read_nodes(["a", "b", "c"], tls=False).in_turn()[0].origin for _ in range(30)}) > 1


def test_the_node_that_answered_last_for_a_name_is_asked_first_for_it():
    endpoints = read_nodes(["a", "b", "c"], tls=False)
    a, b, c = endpoints.in_turn()
    endpoints.mark_answered(b, "x")
    endpoints.mark_answered(c, "y")
    assert (endpoints.in_turn("x"), endpoints.in_turn("y")) == ((b, a, c), (c, a, b))
    assert endpoints.in_turn("z") == endpoints.in_turn() == (a, b, c)
    endpoints.mark_failed(b)
    assert endpoints.in_turn("x") == (a, c, b), "a node that failed is asked last for every name"
    endpoints.mark_answered(b, "y")
    assert endpoints.in_turn("x") == (b, a, c), "and is trusted when it has answered"
    assert endpoints.in_turn("y")[0] is b, "the newest answer counts"


def test_the_memory_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Endpoints, "NAMES", 3)
    endpoints = read_nodes(["a", "b"], tls=False)
    a, b = endpoints.in_turn()
    for name in ("1", "2", "3", "1", "4"):
        endpoints.mark_answered(b, name)
    assert [endpoints.in_turn(name)[0] for name in "1234"] == [b, a, b, b]


@pytest.mark.parametrize("named", ["b:2070", "http://b:2070", "B:2070/"])
def test_the_node_that_an_answer_names_is_asked_next_time(named: str):
    endpoints = read_nodes(["a", "b", "c"], tls=False)
    others = [endpoint for endpoint in endpoints.in_turn() if endpoint.address != "b:2070"]
    endpoints.mark_answered(others[0], "x", named)
    assert endpoints.in_turn("x")[0].address == "b:2070"


@pytest.mark.parametrize("named", ["d:2070", "b:2071", "", "http://b:2070/x", "b", 5, None, [], {"b": 1}])
def test_a_node_that_was_not_configured_is_asked_by_no_hint(named: object):
    endpoints = read_nodes(["a", "b", "c"], tls=False)
    serving = endpoints.in_turn()[-1]
    endpoints.mark_answered(serving, "x", named)
    assert endpoints.in_turn("x")[0] is serving


def test_a_hint_that_misleads_costs_one_request():
    """The node that it names does not serve the lock; the others go on to name it."""
    endpoints = read_nodes(["a", "b"], tls=False)
    serving, other = endpoints.in_turn()
    first = []
    for _ in range(5):
        first.append(endpoints.in_turn("x")[0])
        endpoints.mark_answered(serving, "x", other.address)  # if another one was asked first, it could not answer
    assert first == [serving, other, serving, serving, serving]


def test_an_owner_has_an_unanswered_request_until_it_is_answered():
    unanswered = UnansweredRequests()
    assert not unanswered.begin("a")
    assert unanswered.begin("a")
    unanswered.end("a")
    assert not unanswered.begin("a")


def test_unanswered_requests_are_bounded_and_owners_that_go_on_asking_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(UnansweredRequests, "LIMIT", 3)
    unanswered = UnansweredRequests()
    for owner in ("a", "b", "c", "a", "d"):
        unanswered.begin(owner)
    assert unanswered.begin("a")
    assert not unanswered.begin("b")
