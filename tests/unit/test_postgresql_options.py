"""From a URL to the addresses of the servers; what cannot work is refused, and nothing of a URL is repeated."""

import pytest

from fencing_sdk.backends.postgresql import from_url, schema_sql
from fencing_sdk.backends.postgresql.options import address_from_url
from fencing_sdk.backends.postgresql.schema import newest_function, objects_sql
from fencing_sdk.errors import ConfigurationError

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("postgresql://", ["postgresql://"]),
        ("postgres://h/db", ["postgres://h/db"]),
        ("postgresql://u:p@h:1/db?sslmode=require", ["postgresql://u:p@h:1/db?sslmode=require"]),
        ("postgresql://u:p@a:1,b:2,[::1]:3/db", [f"postgresql://u:p@{host}/db" for host in ("a:1", "b:2", "[::1]:3")]),
        ("postgresql:///db?host=a,b&port=1,2", ["postgresql://a:1/db", "postgresql://b:2/db"]),
        ("postgresql:///db?host=a,b&port=1", ["postgresql://a:1/db", "postgresql://b:1/db"]),
        ("postgresql:///db?host=/run/pg", ["postgresql://%2Frun%2Fpg/db"]),
        ("postgresql://u@/db?host=%2Frun%2Fpg&user=v", ["postgresql://u@%2Frun%2Fpg/db?user=v"]),
        ("postgresql://h/db?options=-c%20a%3Db%20c", ["postgresql://h/db?options=-c%20a%3Db%20c"]),
    ],
)
def test_each_host_has_a_url_of_its_own(url, urls):
    assert list(address_from_url(url).urls) == urls


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
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError) as caught:
        address_from_url(url.replace("{}", SECRET))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r}"
        error = error.__context__


def test_options_of_the_call_and_of_the_query_reach_the_driver_and_ours_do_not():
    backend = from_url("postgresql://h/db?schema=x&sslmode=require", application_name="a b", tokens="counter")
    (url,) = backend._dialer._address.urls
    assert sorted(url.partition("?")[2].split("&")) == ["application_name=a%20b", "sslmode=require"]
    assert backend.schema_sql() == schema_sql("x")


def test_no_password_in_the_repr_of_what_knows_it():
    backend = from_url(f"postgresql://u:{SECRET}@h/db")
    assert SECRET not in f"{backend!r} {backend._dialer!r} {backend._dialer._address!r} {backend._connection!r}"


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
