"""Names are untrusted: what could break a line, a header, a key or a path is refused or escaped once."""

import unicodedata
from enum import Enum, StrEnum
from pathlib import PurePosixPath
from urllib.parse import unquote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fencing_sdk._values.names import NAME_LIMIT, check_name, check_namespace, in_namespace, safe_segment
from fencing_sdk.errors import ConfigurationError, InvalidNameError

pure = settings(deadline=None, max_examples=100)
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)


@pure
@given(st.text(max_size=30))
def test_a_name_is_taken_as_it_is_or_refused(text):
    try:
        accepted = check_name(text)
    except ConfigurationError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert refusal.startswith("name ")
        assert refusal.isprintable()
        return
    assert accepted == text
    assert accepted.encode()
    assert not any(unicodedata.category(char) in {"Cc", "Cs"} for char in accepted)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "}",
        "{}",
        "a}b",
        " ",
        "a b",
        "/",
        "..",
        "../../etc",
        "\\",
        "%00",
        "*?[]",
        "'\";--",
        "\u00e8",
        "e\u0300",
        "🔒",
        "a:b",
    ],
)
def test_odd_names_are_names(name):
    assert check_name(name) == name


def test_two_spellings_of_an_accent_are_two_names():
    assert check_name(unicodedata.normalize("NFC", "è")) != check_name(unicodedata.normalize("NFD", "è"))


SURROGATES = [chr(0xD800), chr(0xDFFF)]
CONTROL = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]


@pytest.mark.parametrize("char", [*CONTROL, *SURROGATES], ids=ascii)
def test_control_characters_and_lone_surrogates_are_refused(char):
    with pytest.raises(ConfigurationError, match=r"^name .* has a control character or a lone surrogate; escape it$"):
        check_name(f"invoices{char}42")


@pytest.mark.parametrize("unit", ["a", "è", "🔒"])
def test_the_limit_counts_bytes_not_characters(unit):
    size = len(unit.encode())
    assert check_name(unit * (NAME_LIMIT // size))
    with pytest.raises(ConfigurationError, match=r"is longer than 512 bytes; use a hash of it"):
        check_name(unit * (NAME_LIMIT // size + 1))


class Table(Enum):
    SEATS = "seats"


class TextTable(str, Enum):  # noqa: UP042  (the older kind prints as its member's name)
    SEATS = "seats"


class ModernTable(StrEnum):
    SEATS = "seats"


class Impostor(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "other"

    def __format__(self, spec: str) -> str:
        return "other"


@pytest.mark.parametrize("name", [TextTable.SEATS, ModernTable.SEATS, Impostor("seats")])
def test_a_kind_of_str_is_one_name_with_and_without_a_namespace(name):
    """``f"{name}"`` of a (str, Enum) member is ``Table.SEATS``: the same member would be two locks."""
    assert type(check_name(name)) is str
    assert check_name(name) == in_namespace("", name) == "seats"
    assert in_namespace("shop", name) == "shop:seats"


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "x" * 513], ids=ascii)
def test_a_bad_name_is_told_apart_from_a_mistake_of_the_program(name):
    """A name may be made of a request, and then it is the request that erred; a namespace never is."""
    with pytest.raises(InvalidNameError):
        check_name(name)
    if name:
        with pytest.raises(ConfigurationError, match=r"^namespace ") as refused:
            check_namespace(name)
        assert type(refused.value) is ConfigurationError


def test_a_member_that_is_no_str_is_refused():
    with pytest.raises(ConfigurationError, match=r"^name must be a str, not Table$") as refused:
        check_name(Table.SEATS)
    assert not isinstance(refused.value, InvalidNameError)


def test_the_empty_namespace_is_no_prefix():
    assert check_namespace("") == ""
    assert in_namespace("", "a") == "a"
    assert in_namespace(check_namespace("shop"), "a") == "shop:a"


def test_namespace_and_name_share_the_limit():
    assert in_namespace("n" * 255, "a" * 256)
    with pytest.raises(ConfigurationError, match=r"^namespace:name .* is longer than 512 bytes"):
        in_namespace("n" * 256, "a" * 256)


@pure
@given(texts, texts)
def test_two_names_never_share_a_segment(one, other):
    assume(one != other)
    assert safe_segment(one) != safe_segment(other)


@pure
@given(texts)
def test_a_segment_is_plain_and_stays_in_its_directory(name):
    segment = safe_segment(name)
    assert segment.isascii()
    assert segment.isprintable()
    assert not set(segment) & set("/\\. :*?\"'<>|&;$\n\0")
    assert PurePosixPath("/data", segment).parent == PurePosixPath("/data")
    assert unquote(segment) == name


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc/passwd", ".hidden", "a/../b", "~"])
def test_paths_do_not_escape(name):
    assert len(PurePosixPath(safe_segment(name)).parts) == 1
    assert not safe_segment(name).startswith(".")
