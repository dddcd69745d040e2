"""
Leased rows as a model of Django: the columns, which ``makemigrations`` finds, and expressions as the parts of a claim.

    class Job(LeasedRow): ...

    jobs = db.rows(Job, where=Q(state="queued"), order=["priority", "id"], on_claim={"attempts": F("attempts") + 1})

As every module with a model, it can be imported once Django is set up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from fencing_sdk._values.drivers import imported_from

with imported_from(None, "django"):
    from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, FieldError, FullResultSet
    from django.db import connections, models, router

from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.guards.sql._transaction import MYSQL, POSTGRESQL, SQLITE
from fencing_sdk.rows._table import NEVER, Part

__all__ = ["LeasedRow"]


class Never(models.Func):  # type: ignore[misc]  # Django has no types
    """The moment in `leased_until` of a row that is free. Migrations name it."""

    allowed_default = True

    def as_sql(self, compiler: object, connection: Any, **_: object) -> tuple[str, list[object]]:  # noqa: ARG002
        """Write it for each database."""
        return NEVER[connection.vendor], []


class _LeftAlone:
    """A column that the database fills in. The instance may have been read earlier, and its token be an old one."""

    attname: str

    def pre_save(self, model_instance: object, add: bool) -> Any:  # noqa: ARG002, FBT001  (Django's own)
        return self.get_default() if add else models.F(self.attname)  # type: ignore[attr-defined]


class LeasedUntilField(_LeftAlone, models.Field):  # type: ignore[misc]
    """Until when a row is leased: a time; in SQLite, seconds since 1970. Migrations name it."""

    empty_strings_allowed = False

    def db_type(self, connection: Any) -> str:
        """Return the type in each database."""
        return {POSTGRESQL: "timestamp with time zone", SQLITE: "real", MYSQL: "datetime(6)"}[connection.vendor]


class LeaseTokenField(_LeftAlone, models.BigIntegerField):  # type: ignore[misc]
    """Token of the last claim of a row. Migrations name it."""


class LeasedRow(models.Model):  # type: ignore[misc]
    """
    Columns of a lease, for a model: ``class Job(LeasedRow)``. ``makemigrations`` finds them.

    The database fills them in, and your code never writes them: ``save()`` leaves them as they are, too.
    """

    leased_until = LeasedUntilField(db_default=Never(), editable=False)
    lease_token = LeaseTokenField(db_default=0, editable=False)

    class Meta:  # noqa: D106
        abstract = True

    @classmethod
    def __leased_rows__(cls, dialect: str) -> _DjangoSql:
        return _DjangoSql(cls, dialect)


class _DjangoSql:
    """Expressions of Django as parts of statements."""

    faults = (FieldDoesNotExist, FieldError, EmptyResultSet, FullResultSet, ValueError)

    def __init__(self, model: Any, dialect: str) -> None:
        about, using = model._meta, router.db_for_write(model)  # noqa: SLF001  (Django documents it)
        self._connection, self._rows = connections[using], models.QuerySet(model, using=using)
        self.table, self.keys = str(about.db_table), [str(about.pk.column)]
        if self._connection.vendor != dialect:
            msg = (
                f"DATABASES has {self._connection.vendor} for model {model.__name__}, and the url of this client is "
                f"one of {dialect}"
            )
            raise ConfigurationError(msg)

    def where(self, part: Any) -> Part:
        if not getattr(part, "conditional", False):
            msg = f"a condition such as Q(state='queued') is expected, not {shown(part)}"
            raise TypeError(msg)
        query = self._rows.filter(part).query
        return self._named(query, *query.get_compiler(connection=self._connection).compile(query.where))

    def order(self, part: Sequence[Any]) -> Part:
        """Write names of fields, ``"-name"`` for the reverse order, or expressions."""
        query = self._rows.order_by(*part).query
        compiler = query.get_compiler(connection=self._connection)
        compiler.setup_query()
        written = [each for _, each in compiler.get_order_by()]
        return self._named(
            query, ", ".join(each[0] for each in written), [value for each in written for value in each[1]]
        )

    def on_claim(self, part: Mapping[str, Any]) -> Part:
        """Write assignments to fields by their names."""
        query = self._rows.query.chain(models.sql.UpdateQuery)
        query.add_update_values(dict(part))
        text, values = query.get_compiler(connection=self._connection).as_sql()
        return self._named(query, text.partition(" SET ")[2], values)

    def _named(self, query: Any, text: str, values: Sequence[object]) -> Part:
        if sum(query.alias_refcount[alias] > 0 for alias in query.alias_map) > 1:
            msg = "it has a field of another table"
            raise TypeError(msg)
        numbers = count()
        text = re.sub("%([s%])", lambda found: "%" if found[1] == "%" else f":v{next(numbers)}", text)
        return text, {f"v{number}": value for number, value in enumerate(values)}
