"""Names of locks, templates for decorators, and claims."""

from __future__ import annotations

import copy
import datetime as dt
import inspect
import pickle
import unicodedata
from enum import Enum, StrEnum
from pathlib import PurePosixPath
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from inside import TOKEN_LIMIT

from fencing_sdk import Token
from fencing_sdk._name_template import NameTemplate
from fencing_sdk._values.claim import NAME_LIMIT, check_name, check_namespace, in_namespace, safe_segment
from fencing_sdk.abc import READER, Claim
from fencing_sdk.errors import ConfigurationError, InvalidNameError

# Names are untrusted: what could break a line, a header, a key or a path is refused or escaped once.


pure = settings(deadline=None, max_examples=100)
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)


@pytest.mark.slow
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


# A lock's name from the arguments of a call: mistakes show when the function is decorated.


async def report(report_id, day=None, *rest, kind="pdf", **more):
    """A function to decorate."""


def fill(template, *args, function=report, **kwargs):
    return NameTemplate(template, function).fill(args, kwargs)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("report", "report"),
        ("report/{report_id}", "report/7"),
        ("{kind}/{report_id}", "pdf/7"),
        ("{report_id:05d}", "00007"),
        ("{day:%F}", "2024-02-29"),
        ("{day.year}", "2024"),
        ("{kind[0]}", "p"),
        ("{kind!r}", "'pdf'"),
        ("{rest}", "()"),
        ("{more}", "{}"),
        ("{{{report_id}}}", "{7}"),
        ("{{}}", "{}"),
    ],
)
def test_placeholders_take_the_calls_arguments_and_the_defaults(template, expected):
    assert fill(template, 7, dt.date(2024, 2, 29)) == expected


def test_positional_and_keyword_arguments_make_one_name():
    template = NameTemplate("{report_id}/{kind}", report)
    assert template.fill((7,), {"kind": "csv"}) == template.fill((), {"kind": "csv", "report_id": 7}) == "7/csv"


def test_a_method_fills_in_its_self():
    class Service:
        tenant = "acme"

        async def build(self, report_id):
            """Decorated in a class body, where there is no instance yet."""

    assert fill("{self.tenant}/{report_id}", Service(), 7, function=Service.build) == "acme/7"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{}", "placeholder without a name"),
        ("a/{}/{}", "placeholder without a name"),
        ("{0}", "placeholder without a name"),
        ("{:>5}", "placeholder without a name"),
        ("{reprot_id}", "placeholder 'reprot_id', which report does not take"),
        ("{reprot.id}", "placeholder 'reprot'"),
        ("{reprot[0]}", "placeholder 'reprot'"),
        ("{ report_id }", "placeholder ' report_id '"),
        ("{report-id}", "placeholder 'report-id'"),
        ("{size}", "placeholder 'size'"),  # would be inside **more
        ("{report_id:{width}}", "a placeholder inside a format"),
        ("}", "not a template"),
        ("{", "not a template"),
        ("a}b", "not a template"),
        ("{report_id", "not a template"),
        ("report_id}", "not a template"),
        ("{report_id[}", "not a template"),
        ("{report_id[0]x}", "not a template"),
        ("{report_id.}", "not a template"),
        ("{report_id!}", "not a template"),
        ("{report_id!z}", "not a template"),
        ("{report_id!r:%F}", "not a template"),
        ("{kind:{kind:{kind}}}", "a placeholder inside a format"),
    ],
)
def test_a_mistake_shows_when_the_function_is_decorated(template, complaint):
    with pytest.raises(ConfigurationError) as caught:
        NameTemplate(template, report)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("name ")
    assert str(caught.value).endswith("write {{ }} for braces")


def test_the_complaint_lists_what_could_be_meant():
    with pytest.raises(ConfigurationError, match=r"its parameters are: report_id, day, rest, kind, more;"):
        NameTemplate("{nobody}", report)


class CompiledByMypyc:
    """Looks as the coroutine functions of mypyc 2.4.1 do: a function to `inspect`, without any parameter."""

    __name__ = "report"
    __defaults__ = __kwdefaults__ = __annotations__ = None
    __code__ = (lambda: None).__code__.replace(co_flags=inspect.CO_COROUTINE)

    def __call__(self, report_id): ...


def test_a_function_that_hides_its_parameters_is_not_said_to_have_none():
    assert fill("report/nightly", 7, function=CompiledByMypyc()) == "report/nightly"
    with pytest.raises(ConfigurationError, match="'report_id', and report hides its parameters, as"):
        NameTemplate("report/{report_id}", CompiledByMypyc())


@pytest.mark.parametrize("template", [None, 5, b"{report_id}", "", "a\nb", "a" * 513, report])
def test_a_template_is_a_name(template):
    with pytest.raises(ConfigurationError, match=r"^name "):
        NameTemplate(template, report)


@pytest.mark.parametrize(
    ("template", "argument"),
    [
        ("{report_id.tenant}", 7),
        ("{report_id[0]}", ()),
        ("{report_id[0]}", 7),
        ("{report_id[a]}", {}),
        ("{report_id:d}", "seven"),
        ("{report_id:%F}", None),
    ],
)
def test_an_argument_that_does_not_fit_its_placeholder_is_named_with_its_cause(template, argument):
    with pytest.raises(ConfigurationError, match=r"^name .* cannot be filled in from this call: ") as caught:
        fill(template, argument)
    assert caught.value.__cause__ is not None


def test_a_call_that_does_not_fit_the_signature_fails_as_it_would_without_the_lock():
    with pytest.raises(TypeError, match=r"^report\(\) missing 1 required positional argument: 'report_id'$"):
        fill("{report_id}")


def test_an_error_of_the_arguments_own_text_is_not_ours_to_hide():
    class Broken:
        def __format__(self, spec: str) -> str:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill("{report_id}", Broken())


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=20))
def test_braces_in_an_argument_are_text(text):
    """Filled in once: an argument never becomes a template."""
    assert fill("r/{report_id}", text) == f"r/{text}"
    assert fill("r/{report_id}", "{kind}{more.__class__}") == "r/{kind}{more.__class__}"


def test_trying_a_template_out_looks_at_no_argument():
    looked_at = []
    probe = type("Probe", (), {"__getattr__": lambda self, name: looked_at.append(name)})()

    async def with_default(order=probe):
        """A default that would notice."""

    NameTemplate("{order.id}", with_default)
    assert looked_at == []
    assert NameTemplate("{order.id}", with_default).fill((SimpleNamespace(id=3),), {}) == "3"


# What travels to a store and back: tokens that are ints, claims that hide their owner.


values = st.integers(0, TOKEN_LIMIT - 1)


@settings(deadline=None)
@given(values, values)
def test_a_token_behaves_as_the_int_it_is(one, other):
    token = Token(one, "9f8a01c2")
    assert token == one
    assert hash(token) == hash(one)
    assert (token < other, token > other, token == other) == (one < other, one > other, one == other)
    assert {one: "found"}[token] == "found"
    assert (str(token), repr(token), f"{token}", f"{token:d}") == (str(one),) * 4
    assert token + 1 == one + 1
    assert bool(token) == bool(one)
    assert isinstance(token, int)


@pytest.mark.parametrize("holder", [None, "9f8a01c2"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_token_keeps_its_holder_when_pickled(holder, protocol):
    back = pickle.loads(pickle.dumps(Token(34, holder), protocol))
    assert type(back) is Token
    assert (int(back), back.holder) == (34, holder)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_token_keeps_its_holder_when_copied(twin):
    back = twin(Token(34, "9f8a01c2"))
    assert (type(back), int(back), back.holder) == (Token, 34, "9f8a01c2")


def test_a_token_knows_no_holder_unless_it_was_told():
    assert Token(34).holder is None
    assert Token(Token(34, "9f8a01c2")).holder is None


@pytest.mark.parametrize("value", ["34", " 34", "\u0663", b"34", 3.7, None, [34]], ids=ascii)
def test_a_token_is_made_from_an_int_alone(value):
    """int() would read the first four and cut the fifth to 3."""
    with pytest.raises(TypeError):
        Token(value)


def test_a_claim_does_not_show_its_owner():
    claim = Claim("seats/42", 15.0, label="worker-1")
    for text in (repr(claim), str(claim), f"{claim}", f"{[claim]}", repr({"claim": claim})):
        assert claim.owner not in text
        assert "seats/42" in text


def test_readers_that_hold_together_are_one_holder_to_a_guard():
    one, other = (Claim("a", 1.0, mode=READER) for _ in range(2))
    assert one.token_holder(7) == other.token_holder(7)
    assert one.holder != other.holder
    assert one.token_holder(7) != one.token_holder(8)
    assert one.token_holder(7) != Claim("b", 1.0, mode=READER).token_holder(7)
    assert Claim("a", 1.0, one.owner).token_holder(7) == one.holder
