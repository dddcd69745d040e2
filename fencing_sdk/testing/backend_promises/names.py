"""Names and metadata are untrusted text: kept as they are, never mixed up, never executed."""

from __future__ import annotations

import pytest

from fencing_sdk.abc import Backend
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest

ODD_NAMES = (
    "a",
    "A",
    " a",
    "a ",
    "a b",
    "a+b",
    "a%20b",
    "a/b",
    "a%2Fb",
    "a//b",
    "a\\b",
    "/a",
    "a/",
    ".",
    "..",
    "../a",
    "../../etc/passwd",
    "a.lock",
    "a:b",
    "a::b",
    "{a}",
    "{a}b",
    "a{}",
    "{0}",
    "%s",
    "%(name)s",
    "%",
    "%00",
    "$1",
    "${HOME}",
    "*",
    "?",
    "[a]",
    "a*",
    "_",
    "'",
    '"',
    "''",
    "`a`",
    "a'; DROP TABLE locks; --",
    "' OR '1'='1",
    "a\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER A WITH ACUTE}",
    "\N{LATIN SMALL LETTER SHARP S}",
    "ss",
    "\N{LATIN SMALL LETTER DOTLESS I}",
    "\N{FULLWIDTH LATIN SMALL LETTER A}",
    "\N{ZERO WIDTH SPACE}",
    "a\N{ZERO WIDTH SPACE}",
    "a\N{NO-BREAK SPACE}b",
    "\N{RIGHT-TO-LEFT OVERRIDE}a",
    "\N{LOCK}",
    "0",
    "00",
    "-1",
    "None",
    "null",
    "true",
    "#",
    "a#b",
    "a?b=c",
    "a&b",
    "a,b",
    "a;b",
    "a|b",
    "a~b",
    "<a>",
    "-rf",
    "x" * 511,
    "x" * 511 + "y",
    "x" * 511 + "z",
    "\N{LOCK}" * 127,
    "\N{LOCK}" * 128,
    "/" * 512,
    "%" * 512,
)
"""Valid names that are easily escaped wrongly, folded into one another, or cut."""

ODD_TEXTS = (
    "",
    " ",
    "0",
    "null",
    'it\'s "quoted" `here` \\ there',
    "two\r\nlines\tand a tab",
    '{"json": [1, 2]}',
    "%s {0} $1 :name ?",
    "'); DROP TABLE locks; --",
    "a\N{COMBINING ACUTE ACCENT}\N{LATIN SMALL LETTER A WITH ACUTE}\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{LOCK}" * 1024,
)


class NamePromises(BackendUnderTest):
    """Every valid name is a lock of its own."""

    async def test_no_two_names_are_the_same_lock(self, backend: Backend) -> None:
        """All are held at once, each by an owner of its own, and each shows its own name and token."""
        claims = [self.claim(name) for name in ODD_NAMES]
        tokens = {claim.name: await self.granted(backend, claim) for claim in claims}
        for claim in claims:
            holder = await backend.inspect(claim.name)
            assert holder is not None, f"{claim.name!r} is shown as free"
            assert (holder.name, holder.holder) == (claim.name, claim.holder)
            assert holder.token == tokens[claim.name]

    async def test_a_release_frees_one_name_alone(self, backend: Backend) -> None:
        """No name is a pattern, a prefix or a folder of others."""
        claims = [self.claim(name) for name in ODD_NAMES]
        for claim in claims:
            await self.granted(backend, claim)
        for released, kept in zip(claims[::2], claims[1::2], strict=False):
            await backend.release(released)
            assert await backend.inspect(released.name) is None
            await self.refused(backend, self.claim(kept.name))

    async def test_a_renewal_is_about_one_name_alone(self, backend: Backend) -> None:
        """In one call, held and free names with the oddest texts side by side."""
        claims = [self.claim(name) for name in ODD_NAMES]
        for claim in claims[::2]:
            await self.granted(backend, claim)
        outcomes = [getattr(outcome, "name", outcome) for outcome in await backend.renew(claims)]
        assert outcomes == ["RENEWED" if number % 2 == 0 else "REFUSED" for number in range(len(claims))]

    @pytest.mark.parametrize("metadata", [None, *ODD_TEXTS], ids=lambda text: ascii(text)[:20])
    async def test_metadata_is_shown_as_it_was_given(self, backend: Backend, metadata: str | None) -> None:
        """And None is None, not a text."""
        claim = self.claim(metadata=metadata)
        await self.granted(backend, claim)
        holder = await backend.inspect(claim.name)
        assert holder is not None
        assert holder.metadata == metadata

    async def test_metadata_belongs_to_the_grant(self, backend: Backend) -> None:
        """The next holder's text replaces it, and no text means none."""
        first, second = self.claim(metadata="batch 7"), self.claim()
        await self.granted(backend, first)
        await backend.release(first)
        await self.granted(backend, second)
        holder = await backend.inspect(second.name)
        assert holder is not None
        assert holder.metadata is None
