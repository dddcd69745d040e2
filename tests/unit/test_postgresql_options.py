"""From a URL to the addresses of the servers; what cannot work is refused, and nothing of a URL is repeated."""

import pytest

from fencing_sdk.backends.postgresql import from_url, schema_sql
from fencing_sdk.backends.postgresql.options import read_url
from fencing_sdk.backends.postgresql.schema import newest_function, objects_sql
from fencing_sdk.errors import ConfigurationError

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "hosts", "rest"),
    [
        ("postgresql://", [{}], {}),
        ("postgres://h/db", [{"host": ["h"]}], {"database": "db"}),
        ("postgresql://u:p@h:1", [{"host": ["h"], "port": [1]}], {"user": "u", "password": "p"}),
        (
            "postgresql://u:p@a:1,b,[::1]:3/db",
            [{"host": ["a"], "port": [1]}, {"host": ["b"]}, {"host": ["::1"], "port": [3]}],
            {"user": "u", "password": "p", "database": "db"},
        ),
        (
            "postgresql:///?host=a,::1&port=1,2&user=u&password=p&dbname=db",
            [{"host": ["a"], "port": [1]}, {"host": ["::1"], "port": [2]}],
            {"user": "u", "password": "p", "database": "db"},
        ),
        ("postgresql:///?host=a,b&port=1", [{"host": ["a"], "port": [1]}, {"host": ["b"], "port": [1]}], {}),
        ("postgresql://a,b:2/?port=1", [{"host": ["a"], "port": [1]}, {"host": ["b"], "port": [2]}], {}),
        ("postgresql:///db?host=/run/pg", [{"host": ["/run/pg"]}], {"database": "db"}),
        ("postgresql://%2Frun%2FPg/db", [{"host": ["/run/Pg"]}], {"database": "db"}),
        ("postgresql:///?port=1", [{"port": 1}], {}),
        ("postgresql://u@/a@b?host=%2Frun%2Fpg&user=v", [{"host": ["/run/pg"]}], {"user": "u", "database": "a@b"}),
    ],
)
def test_each_host_has_arguments_of_its_own(url, hosts, rest, monkeypatch):
    monkeypatch.delenv("PGPORT", raising=False)
    assert [host.arguments() for host in read_url(url).each_host()] == [{**host, **rest} for host in hosts]


@pytest.mark.parametrize(
    "url",
    [
        "mysql://{}",
        "postgresql:{}",
        "postgresql://u:{}@x@h/db",
        "postgresql://u:{}/x@h/db",
        "postgresql://u:{}#x@h/db",
        "postgresql://{}:x@h:port/db",
        "postgresql://u:{}@h:0/db",
        "postgresql://u:{}@h:65536/db",
        "postgresql://u:{}@h:1,/db",
        "postgresql://u:{}@::1/db",
        "postgresql://u:{}@[::1/db",
        "postgresql://u:{}%00@h/db",
        "postgresql://u:{}%FF@h/db",
        "postgresql://u:p?{}@h/db",
        "postgresql://u:{}@h/db?sslmode",
        "postgresql://u:{}@h/db?ssl_mode=require",
        "postgresql://u:{}@h/db?sslmode=",
        "postgresql://u:{}@h/db?sslmode=a&sslmode=b",
        "postgresql:///db?host=a,b&port=1,2,3&password={}",
        "postgresql://u:{}@h/db?host=h2",
        "postgresql:///db?port=1,2&password={}",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError) as caught:
        read_url(url.replace("{}", SECRET))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__context__


@pytest.mark.parametrize("read", [read_url, from_url])
@pytest.mark.parametrize("option", ["channel_binding", "keepalives_idle", "service"])
def test_an_option_of_libpq_that_the_driver_does_not_take_is_named(option, read):
    with pytest.raises(ConfigurationError, match=rf"option {option}\b.*, remove it"):
        read(f"postgresql://u:{SECRET}@h/db?sslmode=require&{option}=1")


def test_options_of_the_call_and_of_the_query_reach_the_driver_and_ours_do_not():
    backend = from_url("postgresql://h/db?schema=x&sslmode=require", application_name="a b", tokens="counter")
    (host,) = backend._dialer.hosts
    assert host.options == {"application_name": "a b", "sslmode": "require"}
    assert "application_name=a%20b" in str(host.options_dsn)
    assert backend.schema_sql() == schema_sql("x")


def test_no_password_in_the_repr_of_what_knows_it():
    backend = from_url(f"postgresql://u:{SECRET}@h/db")
    assert SECRET not in f"{backend!r} {backend._dialer!r} {backend._dialer.hosts!r} {backend._connection!r}"


def test_a_schema_is_quoted_wherever_it_stands():
    hostile = 'a"; DROP TABLE x; --$fencing$'
    written = 'a""; DROP TABLE x; --$fencing$'
    assert f'CREATE SCHEMA IF NOT EXISTS "{written}";' in schema_sql(hostile)
    assert ':"schema"' not in schema_sql(hostile).split("\n", 6)[-1]
    assert newest_function(hostile).startswith(f'"{written}".')


@pytest.mark.parametrize(("schema", "mark"), [("a$fencing$", "$fencing1$"), ("$fencing1$$fencing2$", "$fencing3$")])
def test_a_schema_cannot_end_the_body_of_a_function(schema, mark):
    parts = objects_sql(schema).split(mark)
    assert len(parts) > 40
    assert not [body for body in parts[1::2] if "FUNCTION" in body]
    assert not [rest for rest in parts[2::2] if not rest.startswith(";")]
