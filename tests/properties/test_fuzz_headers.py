"""What comes in a header: the token that was meant, or a refusal, and two readers never disagree."""

from contextlib import suppress
from urllib.parse import unquote

import hypothesis.strategies as st
import pytest
from fuzzing import checked, little_work, long_ones, pieces
from hypothesis import example, given

from fencing_sdk._values.claim import TOKEN_LIMIT, Token
from fencing_sdk._values.token_wire import check_token, format_token, parse_token, parse_written
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.integrations._incoming import RouteTemplate, check_resource, presented
from fencing_sdk.integrations._problem import RequestRefused
from fencing_sdk.integrations.messages import token_of

TEXTS = pieces(
    "0", "34", "9007199254740991", ";holder=", '"9f8a01c2"', '"', ";", ";a=", " ", "\t", "+", "-", "_", "\u0663", ","
)
HOLDERS = st.one_of(st.none(), st.text("0123456789abcdef", min_size=1, max_size=64))


@checked(200)
@given(
    text=st.one_of(TEXTS, st.text(max_size=100), st.binary(max_size=20), st.none(), st.integers(), st.lists(st.text()))
)
@example(text="1" * 5000)
@example(text="34\n")
@example(text="9007199254740992")
def test_any_text_is_a_token_that_can_be_passed_on_or_is_refused(text: object):
    try:
        token = parse_token(text)
    except ConfigurationError:
        return
    assert 0 <= token < TOKEN_LIMIT
    passed_on = parse_written(format_token(token))
    assert (passed_on, passed_on.holder) == (token, token.holder)
    assert text.strip(" ").startswith(f"{token:d}")


@checked(200)
@given(number=st.integers(0, TOKEN_LIMIT - 1), holder=HOLDERS)
def test_a_token_that_is_sent_arrives(number: int, holder: str | None):
    token = Token(number, holder)
    arrived = parse_token(format_token(token))
    assert (arrived, arrived.holder) == (number, holder)


@checked(200)
@given(number=st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=5), st.decimals(), st.none()))
@example(number=10**5000)
def test_what_is_no_token_is_not_taken_for_one(number: object):
    try:
        token = check_token(number)
    except ConfigurationError:
        return
    assert type(number) is int
    assert token == number


@checked(200)
@given(number=st.integers(0, TOKEN_LIMIT - 1), holder=st.text(max_size=70))
def test_a_holder_that_would_not_be_read_back_is_not_sent(number: int, holder: str):
    try:
        text = format_token(Token(number, holder))
    except ConfigurationError:
        return
    assert parse_token(text).holder == holder


@checked(200)
@given(values=st.lists(TEXTS, max_size=3), old=st.lists(TEXTS, max_size=3))
def test_the_headers_of_a_request_have_one_token_or_none_or_are_refused(values: list[str], old: list[str]):
    try:
        token = presented(values, old)
    except RequestRefused:
        return
    assert (token is None) == (not values and not old)
    assert all(parse_token(text) == token for text in (*values, *old))


@checked(200)
@given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from(["Fencing-Token", "x-fencing-token", "FENCING-TOKEN", "other", "\u212aey", ""]),
            st.one_of(TEXTS, st.binary(max_size=20)),
        ),
        max_size=4,
    )
)
def test_the_headers_of_a_message_have_one_token_or_none_or_are_refused(pairs: list[tuple[str, str | bytes]]):
    try:
        token = token_of(pairs)
    except ConfigurationError:
        return
    assert (token is None) == (not [key for key, _ in pairs if "fencing-token" in key.lower()])


@checked(200)
@given(
    path=pieces("/seats/", "/", "42", "%2F", "..", "\0", "\n", "a" * 600),
    resource=st.sampled_from(["seats/{s}", "{f:path}"]),
)
def test_the_path_of_a_request_names_a_resource_or_is_refused(path: str, resource: str):
    try:
        named = RouteTemplate(resource).match(unquote(f"/{path}"), f"/{path}".encode())
        if named is not None:
            check_resource(named)
    except RequestRefused:
        return
    assert named is None or f"/{named}/" in f"{unquote(f'/{path}')}/"


@checked(200)
@given(template=pieces("{", "}", "{{", "}}", "{seat}", "{seat:path}", "{0}", "%", "%s", "!r", ":", "/", ".", "[0]"))
def test_a_template_of_resources_works_or_is_a_configuration_error(template: str):
    try:
        route = RouteTemplate(template)
    except ConfigurationError:
        return
    with suppress(RequestRefused):
        route.match(f"/{template}")


@pytest.mark.parametrize("text", long_ones("1", "0", ";", '34;holder="9f"', " ", "/", "a/", "\u0663"))
def test_a_long_header_or_path_is_little_work(text: str):
    with little_work():
        with pytest.raises(ConfigurationError):
            parse_token(text)
        with pytest.raises(RequestRefused):
            presented([text])
        for template in ("a/{b}/c/{d:path}", "{a}/x/{b}/{c}/y", "{a:path}"):
            with suppress(RequestRefused):
                RouteTemplate(template).match(f"/{text}", f"/{text}".encode())
