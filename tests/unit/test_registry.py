"""From a URL to a backend: schemes, options, lists of hosts, and secrets that no error repeats."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused_urls import refuse_every_url

from fencing_sdk import connect
from fencing_sdk._values.url import HostAddress, read_postgresql_url, split_url
from fencing_sdk.backends import BUILTIN, Builtin, from_url, take_options
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import ConfigurationError, UnsupportedError
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.sql import SqlGuard

# From a URL to a backend: plug-ins are found, drivers are named, and no URL is ever repeated.


SECRET = "hunter2"


def everything_said(error: BaseException) -> str:
    """Return all that a log, an error tracker or a curious caller sees of *error*, its causes and its contexts."""
    said = "".join(traceback.format_exception(error)) + repr(error)
    seen = error
    while seen is not None:
        said += repr(seen) + repr(seen.args)
        seen = seen.__cause__ or seen.__context__
    return said.replace(ascii(SECRET), "")  # this module's own source, in the traceback


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path, into which distributions can be put."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def install(site: Path, name: str, source: str, entries: str) -> None:
    """Put a real distribution there: a module, its metadata and its entry points."""
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fencing_sdk.backends]\n{entries}\n")


VAULT = """
from fencing_sdk.backends import take_options
from fencing_sdk.backends.memory import MemoryBackend

class VaultBackend(MemoryBackend):
    def __init__(self, url, **options):
        super().__init__()
        self.url, self.options = url, options

def from_url(url, **options):
    return VaultBackend(url, **take_options(url, options, ("region",)))
"""


def test_a_distribution_brings_a_backend_by_an_entry_point(site):
    install(site, "vault_locks", VAULT, "vault = vault_locks:from_url")
    backend = from_url("vault://host/path?region=eu")
    assert type(backend).__name__ == "VaultBackend"
    assert backend.url == "vault://host/path?region=eu"
    assert backend.options == {"region": "eu"}


async def test_a_backend_by_an_entry_point_keeps_locks(site):
    install(site, "vault_locks", VAULT, "vault = vault_locks:from_url")
    async with connect("vault://host", region="eu") as locks, locks.lock("seats/42", ttl=2) as lease:
        assert lease.token > 0


@pytest.mark.parametrize(
    ("scheme", "plain"),
    [
        ("postgresql+asyncpg", "postgresql"),
        ("postgresql+psycopg", "postgresql"),
        ("postgresql+psycopg2", "postgresql"),
        ("postgresql+psycopg_async", "postgresql"),
        ("postgres+asyncpg", "postgres"),
        ("sqlite+aiosqlite", "sqlite"),
        ("sqlite+pysqlite", "sqlite"),
    ],
)
def test_a_url_of_sqlalchemy_is_refused_with_the_driver_to_drop(scheme, plain):
    with pytest.raises(ConfigurationError) as refusal:
        connect(f"{scheme}://me:{SECRET}@db/app")
    message = str(refusal.value)
    assert f"drop '+{scheme.partition('+')[2]}'" in message
    assert f"{plain}://" in message
    assert "zookeeper" not in message  # the list of all schemes hides what to do
    assert SECRET not in everything_said(refusal.value)


def test_an_entry_point_does_not_replace_a_built_in_backend(site):
    install(site, "vault_locks", VAULT, "memory = vault_locks:from_url")
    assert type(from_url("memory://")) is MemoryBackend


def test_an_unknown_scheme_lists_the_known_ones_and_the_installed_ones(site):
    install(site, "vault_locks", VAULT, "vault = vault_locks:from_url")
    with pytest.raises(ConfigurationError) as caught:
        from_url(f"valt://user:{SECRET}@host")
    text, _, known = str(caught.value).partition("; known are ")
    assert text == "no backend for 'valt' URLs (did you mean vault?)"
    stores = known.split(", ")
    assert {"postgresql", "redis", "sqlite", "vault"} <= set(stores)
    assert len(stores) == len({builtin.module for builtin in BUILTIN.values()}) + 1, "one scheme of each store"
    with pytest.raises(
        ConfigurationError, match=r"^no backend for 'Redis\+Sentinel' URLs \(did you mean redis\+sentinel\?\)"
    ):
        from_url(f"Redis+Sentinel://user:{SECRET}@host")
    with pytest.raises(ConfigurationError, match=r"^no backend for 'nosuch' URLs; known are"):
        from_url(f"nosuch://user:{SECRET}@host")


def test_an_empty_url_is_called_empty():
    with pytest.raises(ConfigurationError, match=r"^url is empty; is the variable set"):
        from_url("")


@pytest.mark.parametrize(
    ("source", "entry", "complaint"),
    [
        ("import vault_driver_that_nobody_installed", "vault_locks:from_url", "vault_driver_that_nobody_installed"),
        ("", "vault_locks:from_url", "from_url"),
        ("", "vault_gone:from_url", "vault_gone"),
    ],
    ids=["driver", "attribute", "module"],
)
def test_an_entry_point_that_cannot_be_loaded_is_named_with_its_cause(site, source, entry, complaint):
    install(site, "vault_locks", source, f"vault = {entry}")
    with pytest.raises(ConfigurationError, match=r"^the backend for 'vault' URLs, .* cannot be loaded: ") as caught:
        from_url(f"vault://user:{SECRET}@host")
    assert complaint in str(caught.value)
    assert caught.value.__cause__ is not None
    assert SECRET not in everything_said(caught.value)


def test_a_missing_driver_names_the_extra_to_install(site, monkeypatch):
    (site / "valet.py").write_text("import a_driver_that_nobody_installed\n")
    monkeypatch.setitem(BUILTIN, "valet", Builtin("valet", extra="valet"))
    with pytest.raises(ConfigurationError) as caught:
        from_url(f"valet://user:{SECRET}@host")
    assert str(caught.value) == (
        "a_driver_that_nobody_installed is not installed; run: pip install 'fencing-sdk[valet]', "
        "or '.[valet]' in a checkout"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert SECRET not in everything_said(caught.value)


def test_in_a_frozen_program_a_missing_driver_names_how_to_pack_it(site, monkeypatch):
    (site / "valet.py").write_text("import a_driver.of_it\n")
    monkeypatch.setitem(BUILTIN, "valet", Builtin("valet", extra="valet"))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigurationError) as caught:
        from_url(f"valet://user:{SECRET}@host")
    assert str(caught.value) == (
        "a_driver was left out when this program was packed; run there: pip install 'fencing-sdk[valet]', or "
        "'.[valet]' in a checkout; if that was done, add --collect-submodules=a_driver (PyInstaller) or "
        "--include-package=a_driver (Nuitka)"
    )


@pytest.mark.parametrize(
    "source",
    ["from redis.asyncio import ThatWasRenamed\n", "import kazoo.exceptions\nkazoo.exceptions.ThatWasRenamed\n"],
    ids=["import", "attribute"],
)
def test_a_driver_that_lacks_what_is_needed_is_not_called_missing(site, monkeypatch, source):
    (site / "valet.py").write_text(source)
    monkeypatch.setitem(BUILTIN, "valet", Builtin("valet", extra="valet"))
    with pytest.raises(ConfigurationError) as caught:
        from_url(f"valet://user:{SECRET}@host")
    assert "the installed driver cannot be used (" in str(caught.value)
    assert "ThatWasRenamed" in str(caught.value)
    assert str(caught.value).endswith(
        "for a version that works, run: pip install 'fencing-sdk[valet]', or '.[valet]' in a checkout"
    )
    assert SECRET not in everything_said(caught.value)
    monkeypatch.setattr("fencing_sdk.backends.daemon_threads_allowed", lambda: False)
    with pytest.raises(UnsupportedError, match=r"in a subinterpreter .*; use it in the main interpreter or a process"):
        from_url("valet://")


def test_what_a_backend_without_a_driver_lacks_is_its_own_fault(site, monkeypatch):
    (site / "valet.py").write_text("from json import a_name_it_never_had\n")
    monkeypatch.setitem(BUILTIN, "valet", Builtin("valet"))
    with pytest.raises(ImportError, match=r"a_name_it_never_had"):
        from_url("valet://")


def test_every_built_in_backend_can_be_loaded(tmp_path):
    examples = {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path}/locks.db",
        "kahuna": "kahuna://localhost",
        "kahuna+https": "kahuna+https://localhost",
        "etcd": "etcd://localhost",
        "etcd+https": "etcd+https://localhost",
        **{scheme: f"{scheme}://localhost" for scheme in ("redis", "rediss", "valkey", "valkeys")},
        **{scheme: f"{scheme}:///run/redis.sock" for scheme in ("unix", "redis+unix")},
        **{scheme: f"{scheme}://localhost/service" for scheme in ("redis+sentinel", "rediss+sentinel")},
        **{scheme: f"{scheme}://localhost" for scheme in ("redis+cluster", "rediss+cluster")},
        **{scheme: f"{scheme}://a,b:6380,[::1]:6381" for scheme in ("redis+quorum", "rediss+quorum")},
        **{scheme: f"{scheme}://localhost/app" for scheme in ("postgresql", "postgres")},
        **{scheme: f"{scheme}://localhost/app" for scheme in ("mysql", "mariadb")},
        **{scheme: f"{scheme}://a,b:2182,[::1]:2183/shop" for scheme in ("zk", "zookeeper")},
    }
    assert set(examples) == set(BUILTIN)
    for url in examples.values():
        assert from_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "memory",
        "memory:",
        "memory:/",
        "://",
        "://host",
        " memory://",
        "memory ://",
        "1memory://",
        "-x://",
        "memory\n://",
        "memory://\n",
        "memory://a\rb",
        "memory://\0",
        "memory://\x7f",
        "m\u00e9mory://",
        "\u0661://",
        f"user:{SECRET}@host/path?next=http://elsewhere",
        f"{SECRET}@host://",
        f"{SECRET}" + "x" * 100 + "://",
        "x" * 1_000_000,
    ],
    ids=lambda url: ascii(url)[:30],
)
def test_what_is_no_url_is_refused_without_repeating_it(url):
    with pytest.raises(
        ConfigurationError, match=r"^url must look like 'redis://host:6379' or 'sqlite:///locks.db'"
    ) as caught:
        from_url(url)
    assert SECRET not in everything_said(caught.value)


UNLUCKY = [
    "memory://user:{}@host",
    "memory://user:pa?{}@host",
    "memory://user:pa?{}=1@host",
    "memory://user:pa#{}@host",
    "memory://user:pa?tokens=counter&{}@host",
    "memory://user:{}\u2100@host",  # not allowed in a host, and urllib says so by quoting all of it
    "memory://[{}",
    "memory://[{}]/",
    "memory://user:{}@[::1",
    "memory://?password={}",
    "memory://?{}",
    "memory://?{}={}",
    "memory://?tokens={}&tokens={}",
    "nosuch://user:{}@host/?a={}",
    "nosuch://{}",
    "etcd://user:{}@host:99999",
    "etcd://user:{}@host/path",
    "etcd://user:pa@{}@host,user:pa@host",
    "etcd://user:pa/{}@host",
    "etcd://{}@host",
    "etcd://:{}@host",
    "etcd://user:{}@host?password={}",
    "etcd://user:{}@host?ca={}",
    "zk://user:{}@host:99999",
    "zk://user:{}@host/a//b",
    "zk://user:{}@host,user:{}@host",
    "zk://user:pa/{}@host",
    "zk://{}@host",
    "zk://:{}@host",
    "zk://us%3Aer:{}@host",
    "zk://user:{}@host?password={}",
    "zk://user:{}@host?tls=true&ca={}",
    "zk://user:{}@host?tls={}",
    "zk://user:{}@host?sasl={}",
    "sqlite://user:{}@host/locks.db",
    "sqlite:///locks.db?key={}",
    "sqlite:///locks.db#{}",
    "sqlite:///locks.db?{}=1",
]


@pytest.mark.parametrize("url", UNLUCKY)
def test_a_password_in_a_url_is_in_no_error_whatever_part_it_slipped_into(url):
    with pytest.raises(ConfigurationError) as caught:
        connect(url.replace("{}", SECRET))
    assert SECRET not in everything_said(caught.value)
    assert str(caught.value).isprintable()


@settings(deadline=None, max_examples=150)
@given(st.text("ab:/?#[]@!$&'()*+,;=%\u2100\u2048. ", max_size=12), st.text(":/?#[]@&=%", max_size=3))
def test_no_url_at_all_makes_another_error_or_shows_its_password(before, after):
    url = f"memory://{before}{SECRET}{after}"
    with pytest.raises(ConfigurationError) as caught:
        from_url(url)
    assert SECRET not in everything_said(caught.value)


def test_options_stand_in_the_query_or_in_the_call():
    assert take_options("x://h?a=1&b=", {"c": 3}, ("a", "b", "c")) == {"a": "1", "b": "", "c": 3}
    assert take_options("x://h", {}, ()) == {}
    assert take_options("x://h?a=%26%3D", {}, ("a",)) == {"a": "&="}


@pytest.mark.parametrize("url", ["x://h?a=1#b", "x://h#", "x://h#?a=1", "memory://?tokens=counter#x"])
def test_nothing_of_a_url_is_dropped_in_silence(url):
    with pytest.raises(ConfigurationError, match=r"^url has a '#', .* write %23 for a literal one$"):
        take_options(url, {}, ("a", "tokens"))


def test_an_unknown_option_of_the_call_is_named_with_the_known_ones():
    with pytest.raises(
        ConfigurationError,
        match=r"^unknown option 'tokns' of this backend \(did you mean tokens\?\); known are tokens, region$",
    ):
        take_options("x://h", {"tokns": "counter"}, ("tokens", "region"))
    with pytest.raises(ConfigurationError, match=r"^unknown option 'ttl' .* a lock: .*; known are none$"):
        take_options("x://h", {"ttl": 5}, ())


def test_an_unknown_option_of_the_query_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"^unknown option in the url's query; known are tokens "):
        take_options("x://h?region=counter", {}, ("tokens",))


@pytest.mark.parametrize(
    "read",
    [
        lambda url: take_options(url, {}, ("region", "tokens")),
        lambda url: read_postgresql_url(f"postgresql{url[1:]}", known=("region", "tokens")),
    ],
)
def test_a_mistyped_option_of_the_query_gets_the_nearest_one_and_is_never_shown(read):
    for option, near in (("tokns", r"query \(did you mean tokens\?\); known"), (SECRET, "query; known")):
        with pytest.raises(ConfigurationError, match=near) as caught:
            read(f"x://h?{option}=counter")
        assert option not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "known", "near"),
    [("ssl", "tls", "tls"), ("ssl_ca", "ca", "ca"), ("tls", "sslmode", "sslmode"), ("tls_ca", "ssl_ca", "ssl_ca")],
)
def test_an_option_for_tls_is_found_by_the_word_of_another_driver(option, known, near):
    with pytest.raises(ConfigurationError, match=rf"did you mean {near}\?"):
        take_options(f"x://h?{option}=1", {}, ("region", known))


@pytest.mark.parametrize(("url", "options"), [("x://h?a=1&a=2", {}), ("x://h?a=1", {"a": 1})])
def test_an_option_that_is_given_twice_is_refused(url, options):
    with pytest.raises(ConfigurationError, match=r"^option a occurs twice$"):
        take_options(url, options, ("a",))


@pytest.mark.parametrize(
    "options", [{"tokens": "serial"}, {"tokens": None}, {"tokens": 1}, {"tokens": b"hybrid"}, {"tokens": ""}]
)
def test_a_bad_value_of_an_option_is_refused(options):
    with pytest.raises(ConfigurationError, match=r"^tokens must be 'hybrid' or 'counter', got "):
        from_url("memory://", **options)


# Where the servers of a URL are: one reading for all stores, the guards and the command line, on every Python.


PATHS = {"redis+sentinel": "/service", "rediss+sentinel": "/service", "zk": "/shop", "zookeeper": "/shop"}
PATHS |= {"mysql": "/app", "mariadb": "/app"}
LISTS = sorted({*BUILTIN} - {"memory", "sqlite", "unix", "redis+unix", "redis", "rediss", "valkey", "valkeys"})
"""The schemes that take a list of hosts."""


def url_of(scheme: str, hosts: str) -> str:
    return f"{scheme}://{hosts}{PATHS.get(scheme, '')}"


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("h", [("h", None)]),
        ("H.example:1,h2:65535", [("h.example", 1), ("h2", 65535)]),
        ("h1,[::1]:2,[FE80::1]", [("h1", None), ("::1", 2), ("fe80::1", None)]),
        ("[::ffff:127.0.0.1]:3", [("::ffff:127.0.0.1", 3)]),
        ("[fe80::1%25eth0]:4,[fe80::2%en0]", [("fe80::1%eth0", 4), ("fe80::2%en0", None)]),
        ("a%2Db,127.0.0.1:5,b%C3%BCcher.example", [("a-b", None), ("127.0.0.1", 5), ("b\u00fccher.example", None)]),
        ("u:p@h1:1,h2", [("h1", 1), ("h2", None)]),
        ("u%40x:p%40%2F%3A%2C@[::1],h2", [("::1", None), ("h2", None)]),
        (":p,w@h", [("h", None)]),
    ],
)
def test_hosts_are_read_with_their_ports(hosts: str, addresses: list[HostAddress]):
    parts = split_url(f"x://{hosts}/path?a=b")
    assert list(parts.addresses()) == addresses
    assert (parts.scheme, parts.path, parts.query) == ("x", "/path", "a=b")


def test_user_and_password_are_decoded_and_in_no_repr():
    parts = split_url("x://u%40x:p%40%2F%3A%2C:%C3%BC@h")
    assert (parts.user, parts.password) == ("u@x", "p@/:,:\u00fc")
    assert "p@/" not in repr(parts)
    for url, login in (
        ("x://h", (None, None)),
        ("x://@h", ("", None)),
        ("x://u@h", ("u", None)),
        ("x://:@h", ("", "")),
    ):
        assert (split_url(url).user, split_url(url).password) == login


@pytest.mark.parametrize(
    ("guard", "url"),
    [
        (EtcdGuard, "etcd://u:p@h1,[::1]:2"),
        (KahunaGuard, "kahuna://h1,[::1]:2"),
        (SqlGuard, "postgresql://u:p@h1,[::1]:2/app"),
        (SqlGuard, "sqlite:///app.db"),
    ],
)
async def test_guards_read_their_urls_there_too(guard, url: str, monkeypatch):
    refuse_every_url(monkeypatch)
    made = guard(url)
    if inspect.iscoroutinefunction(getattr(made, "aclose", None)):
        await made.aclose()


def test_the_driver_of_postgresql_is_given_parts():
    url = read_postgresql_url("postgresql://u%40x:p%2Fw@h1:1,[::1]:2,h3/shop%2F1?sslmode=require&options=-c%20a%3Db")
    assert url.arguments() == {
        "user": "u@x",
        "password": "p/w",
        "database": "shop/1",
        "host": ["h1", "::1", "h3"],
        "port": [1, 2, 5432],
    }
    assert url.options_dsn == "postgresql://?sslmode=require&options=-c%20a%3Db"
    assert [(one.place, one.arguments()["host"]) for one in url.each_host()] == [
        ("h1:1", ["h1"]),
        ("[::1]:2", ["::1"]),
        ("h3:5432", ["h3"]),
    ]
    assert read_postgresql_url("postgresql://").arguments() == {}


@pytest.mark.parametrize("scheme", LISTS)
@pytest.mark.parametrize(
    ("hosts", "part"),
    [
        ("h1,,h3", "host 2 of url is empty"),
        ("h1,h2,", "host 3 of url is empty"),
        ("h1,:1,h3", "host 2 of url is empty"),
        ("h1, h2,h3", "host 2 of url has a space"),
        ("h1,h2 ,h3", "host 2 of url has a space"),
        ("h1,h%202,h3", "host 2 of url has a space"),
        ("h1,h2:0,h3", "host 2 of url has a port that is not a number from 1 to 65535"),
        ("h1,h2:65536,h3", "host 2 of url has a port"),
        ("h1,h2:,h3", "host 2 of url has a port"),
        (f"h1,h2:{SECRET},h3", "host 2 of url has a port"),
        ("h1,h2:\u0661,h3", "host 2 of url has a port"),
        ("h1,::1,h3", "host 2 of url has an IPv6 address without brackets"),
        ("h1,[::1,h3", "host 2 of url has brackets, but no IPv6 address in them"),
        ("h1,[::1]x:1,h3", "host 2 of url has brackets"),
        (f"h1,[{SECRET}],h3", "host 2 of url has brackets"),
        ("h1,[127.0.0.1],h3", "host 2 of url has brackets"),
        ("h1,[::1%25],h3", "host 2 of url has brackets"),
        (f"h1,h2]{SECRET},h3", "host 2 of url has a character that cannot be in a host"),
        ("h1,h%2C2,h3", "host 2 of url has a character that cannot be in a host"),
        ("h1,h%FF,h3", "host 2 of url has bytes that are not UTF-8"),
        ("h1,h%00,h3", "host 2 of url has a space or a control character"),
        (f"u:{SECRET}@x@h1,h2,h3", "url has two '@'"),
        (f"u:{SECRET}@h1,u:{SECRET}@h2,h3", "url has two '@'"),
        (f"h1:1,u:{SECRET}@h2,h3", "url has a host before the user"),
        (f"u:1/{SECRET}@h1,h2,h3", "url has a '/' before an '@'; in user and password write %2F"),
        (f"u:{SECRET}%FF@h1,h2,h3", "url has bytes in its password that are not UTF-8"),
        (f"u%FF:{SECRET}@h1,h2,h3", "url has bytes in its user that are not UTF-8"),
        (f"u:{SECRET}%0A@h1,h2,h3", "url has a control character in its password"),
        (f"u:{SECRET}#@h1,h2,h3", "url has a '#'"),
    ],
)
def test_an_error_names_the_part_and_repeats_nothing(scheme: str, hosts: str, part: str):
    with pytest.raises(ConfigurationError) as refused:
        from_url(url_of(scheme, hosts))
    assert str(refused.value).startswith(part)
    assert SECRET not in everything_said(refused.value)
