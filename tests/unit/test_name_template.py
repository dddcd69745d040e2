"""A lock's name from the arguments of a call: mistakes show when the function is decorated."""

import datetime as dt
import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencing_sdk._name_template import NameTemplate
from fencing_sdk.errors import ConfigurationError


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
        ("{kind:>{report_id}}", "    pdf"),
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


def test_catch_all_parameters_are_parameters():
    assert fill("{rest[0]}/{more[size]}", 7, None, "first", size=3) == "first/3"


def test_a_partial_has_the_parameters_that_are_left():
    assert fill("{day}", 8, function=functools.partial(report, 7)) == "8"
    with pytest.raises(ConfigurationError, match=r"placeholder 'report_id'"):
        NameTemplate("{report_id}", functools.partial(report, 7))


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
        ("{report_id:{width}}", "placeholder 'width'"),
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
        ("{kind:{kind:{kind}}}", "not a template"),
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
