"""A token in a header: what is written can be read back, and nothing else is a token."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import TOKEN_LIMIT

from fencing_sdk import Token
from fencing_sdk._values.token import (
    TEXT_LIMIT,
    check_token,
    format_token,
    parse_one_token,
    parse_token,
    parse_written,
    token_headers,
    token_metadata,
)
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.integrations.clients import Origin

pure = settings(deadline=None, max_examples=300)
values = st.integers(0, TOKEN_LIMIT - 1)
holders = st.none() | st.binary(min_size=1, max_size=32).map(bytes.hex)

NOT_A_TOKEN = [
    "",
    " ",
    "+1",
    "-1",
    "-0",
    "\t1",
    "1\n",
    "1\r\n",
    "\n1",
    "1\x00",
    "1\x0b",
    "1\u2028",
    "1.0",
    ".1",
    "1.",
    "1e3",
    "1E3",
    "0x1",
    "0b1",
    "0o7",
    "1_000",
    "1,000",
    "1,2",
    "1, 2",
    "34, 34",
    "1;",
    "00",
    "01",
    "007",
    "0034",
    "NaN",
    "inf",
    "None",
    "True",
    "?1",
    ":MQ==:",
    '"34"',
    "'34'",
    "(34)",
    "@34",
    "\u0663\u0664",  # Arabic-Indic digits: int() takes them
    "\u0967",  # Devanagari
    "\uff11",  # full width
    "\U0001d7cf",  # mathematical bold
    "\u00b2",  # superscript: isdigit() takes it
    "1\ufeff",
    str(TOKEN_LIMIT),
    str(TOKEN_LIMIT + 1),
    str(2**63),
    str(2**64),
    "9" * 16,
    "9" * 17,
    "9" * 10_000,
    "0" * 10_000,
    '34 ;holder="9f8a01c2"',
    '34;holder ="9f8a01c2"',
    '34;holder= "9f8a01c2"',
    '34;\tholder="9f8a01c2"',
    '34;;holder="9f8a01c2"',
    '34;holder="9f8a01c2";',
    '34;holder="9f8a01c2"\n',
    '34;holder="9f8a01c2",35',
    '34;holder="9f8a01c2";holder="9f8a01c2"',
    "34;ttl=",
    "34;ttl=5s",
    "34;TTL=5",
    "34;1=5",
    "34;ttl=1234567890123456",
    "34;ttl=1.2345",
    '34;note="a',
    '34;note="\u00e9"',
    "34;note='a'",
    "34;at=@1.5",
    "34;sure=?2",
    '34;Holder="9f8a01c2"',
    "34;holder=9f8a01c2",
    "34;holder",
    "34;holder=",
    '34;holder=""',
    '34;holder="9F8A01C2"',
    '34;holder="9f8a\\"01"',
    '34;holder="9f8a01c2',
    "34;holder='9f8a01c2'",
    '34;holder="zzzz"',
    '34;holder="\u0663"',
    '34;holder="9f8a\n01c2"',
    f'34;holder="{"a" * 65}"',
    'holder="9f8a01c2"',
    'holder="9f8a01c2";34',
    "34\r\nSet-Cookie: a=b",
    "34 OR 1=1",
    "a" * 1_000_000,
    None,
    34,
    b"34",
    3.4,
    True,
    ["34"],
]


@pytest.mark.parametrize("text", NOT_A_TOKEN, ids=lambda text: ascii(text)[:40])
def test_whatever_is_not_exactly_a_token_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"^not a fencing token: .*; expected digits such as 34$") as caught:
        parse_token(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("text", "value", "holder"),
    [
        ("0", 0, None),
        ("34", 34, None),
        (str(TOKEN_LIMIT - 1), TOKEN_LIMIT - 1, None),
        ('0;holder="0"', 0, "0"),
        ('34;holder="9f8a01c2"', 34, "9f8a01c2"),
        (f'34;holder="{"a" * 64}"', 34, "a" * 64),
    ],
)
def test_what_is_a_token(text, value, holder):
    token = parse_token(text)
    assert (token, token.holder) == (value, holder)


ITEMS = {
    " 34": None,
    "34 ": None,
    "34; ttl=5": None,
    '34; holder="9f8a01c2"': "9f8a01c2",
    '34;   holder="9f8a01c2" ': "9f8a01c2",
    '34;ttl=5;holder="9f8a01c2"': "9f8a01c2",
    '34;holder="9f8a01c2";ttl=-5.25;sure;*=?0': "9f8a01c2",
    '34;note="; holder=\\"aa\\" \\\\";holder="bb"': "bb",
    '34;a=b/c:d;at=@-17;raw=:aGk=:;name=%"B%c3%a4r"; a-1.b_*=*x;ttl;ttl=2': None,
}
"""What RFC 9651 allows and we do not write, with the holder in it."""


@pytest.mark.parametrize("text", ITEMS)
def test_an_item_of_rfc_9651_is_read_and_its_other_parameters_are_ignored(text):
    token = parse_token(text)
    assert (token, token.holder) == (34, ITEMS[text])
    assert len(text) < TEXT_LIMIT
    with pytest.raises(ConfigurationError, match=r"^not a fencing token"):
        parse_written(text)


@pytest.mark.parametrize(
    ("values", "old", "holder"),
    [
        (["34"], [], None),
        ([], ['34;holder="aa"'], "aa"),
        (["34"], ["34"], None),
        (['34;holder="aa"'], ["34"], "aa"),
        (["34"], ['34; holder="aa"'], "aa"),
    ],
)
def test_the_one_token_of_both_names(values, old, holder):
    token = parse_one_token(values, old)
    assert (token, token.holder) == (34, holder)


@pytest.mark.parametrize(
    ("values", "old", "error"),
    [
        (["34", "34"], [], "more than once"),
        ([], ["34", "34"], "more than once"),
        (["34"], ["35"], "disagree"),
        (['34;holder="aa"'], ['34;holder="bb"'], "disagree"),
        (["34"], ["x"], "not a fencing token"),
    ],
)
def test_two_tokens_are_none(values, old, error):
    with pytest.raises(ConfigurationError, match=error):
        parse_one_token(values, old)


@pure
@given(values, holders)
def test_what_is_written_can_be_read_back(value, holder):
    for read in (parse_token, parse_written):
        back = read(format_token(Token(value, holder)))
        assert (int(back), back.holder) == (value, holder)


@pure
@given(st.text(max_size=30) | st.from_regex(r'[0-9]{1,17}(;[a-z]{1,7}="[0-9a-f]{0,9}")?\s?'))
def test_there_is_one_way_to_write_a_token(text):
    """Two spellings of one fence would be two fences to a comparison of texts."""
    try:
        token = parse_written(text)
    except ConfigurationError:
        return
    assert format_token(token) == text


@pure
@given(values, holders)
def test_a_header_value_is_printable_ascii_and_short(value, holder):
    text = format_token(Token(value, holder))
    assert re.fullmatch(r"[ -~]{1,100}", text, re.ASCII)


@pytest.mark.parametrize(
    "holder", ["", "x", "9F", 'a"', "a\r\nX-Evil: 1", "è", "a" * 65, "a b", 'a";ttl="1', "\u0663"], ids=ascii
)
def test_a_holder_made_by_hand_cannot_break_out_of_the_header(holder):
    with pytest.raises(ConfigurationError, match=r"^not a fencing token"):
        format_token(Token(34, holder))


@pytest.mark.parametrize("value", [-1, TOKEN_LIMIT, 2**63, 10**5000], ids=lambda value: f"{value.bit_length()} bits")
def test_a_number_that_cannot_be_read_is_not_written(value):
    with pytest.raises(ConfigurationError, match=r"^token must be from 0 to below 2\*\*53"):
        format_token(Token(value))


@pytest.mark.parametrize(
    "token",
    [None, "34", b"34", 34.0, True, False, [34], (34,), object(), -1, TOKEN_LIMIT, 2**64, 10**5000],
    ids=lambda token: ascii(token)[:20] if not isinstance(token, int) else f"{token.bit_length()} bits {token > 0}",
)
def test_only_an_int_in_range_is_taken_for_a_token(token):
    with pytest.raises(ConfigurationError, match=r"^high_water must be ") as caught:
        check_token(token, "high_water")
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(("begins", "repeats"), [("", "9"), ("", "0"), ('34;holder="', "a")])
def test_a_huge_header_is_refused_without_being_converted(begins, repeats):
    """int() of a long number takes quadratic time where its limit is lifted, and fails in its own way elsewhere."""
    text = begins + repeats * 4_000_000
    began = time.process_time()
    with pytest.raises(ConfigurationError):
        parse_token(text)
    assert time.process_time() - began < 2


def test_the_longest_token_is_read():
    text = f'{TOKEN_LIMIT - 1};holder="{"a" * 64}"'
    text += f';note="{"x" * (TEXT_LIMIT - len(text) - 8)}"'
    assert len(text) == TEXT_LIMIT
    assert parse_token(text) == TOKEN_LIMIT - 1
    with pytest.raises(ConfigurationError):
        parse_token(f"{text};a")


def test_metadata_is_the_header_in_lower_case():
    token = Token(34, "aa")
    assert token_metadata(token) == tuple((name.lower(), text) for name, text in token_headers(token).items())


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        ("https://seats.example", ("https", "seats.example", None)),
        ("https://seats.example/", ("https", "seats.example", 443)),
        ("HTTPS://Seats.Example:443", ("https", "SEATS.example", 443)),
        ("http://seats.example:80", ("http", "seats.example", None)),
        ("http://[0:0::1]:8080", ("http", "::1", 8080)),
        ("http://xn--bcher-kva.example", ("http", "xn--bcher-kva.example", 80)),
    ],
)
def test_origins_are_compared_with_their_default_ports_and_without_case(origin, url):
    assert Origin.parse(origin) == Origin.of(*url)


@pytest.mark.parametrize(
    "url",
    [
        ("http", "seats.example", 443),
        ("https", "seats.example", 8443),
        ("https", "seats.example.", 443),
        ("https", "www.seats.example", 443),
        ("https", "seats.example.evil.test", 443),
        ("wss", "seats.example", 443),
    ],
)
def test_an_origin_that_differs_in_anything_is_another_one(url):
    assert Origin.parse("https://seats.example") != Origin.of(*url)
