"""
Leased rows as a model of SQLAlchemy: the columns, which Alembic finds, and expressions as the parts of a claim.

    class Job(LeasedRow, Base): ...

    jobs = db.rows(Job, where=Job.state == "queued", order=[Job.priority], on_claim={Job.attempts: Job.attempts + 1})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fencing_sdk._values.drivers import imported_from

with imported_from("sqlalchemy", "sqlalchemy"):
    from sqlalchemy import REAL, TIMESTAMP, BigInteger, ColumnElement, and_, column, inspect, text
    from sqlalchemy.dialects.mysql import DATETIME
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.compiler import compiles
    from sqlalchemy.orm import Mapped, declared_attr, mapped_column
    from sqlalchemy.sql.expression import ClauseElement, ClauseList

from fencing_sdk.guards.sql._transaction import MYSQL, POSTGRESQL, SQLITE, dialect_of
from fencing_sdk.rows._table import NEVER, Part

__all__ = ["LeasedRow"]

_DRIVERS = {POSTGRESQL: "postgresql+asyncpg://", SQLITE: "sqlite+pysqlite://", MYSQL: "mysql+asyncmy://"}
"""Drivers of the clients of leased rows, which decide how a value is written."""


class _Never(ColumnElement[object]):
    inherit_cache = True


@compiles(_Never)
def _write_never(_: _Never, compiler: Any, **_options: object) -> str:
    return NEVER.get(dialect_of(compiler.dialect.name), NEVER[POSTGRESQL])  # also where a model is only printed


class LeasedRow:
    """
    Columns of a lease, for a declarative model: ``class Job(LeasedRow, Base)``. Alembic's autogenerate finds them.

    The database fills them in, and your code never writes them. They are loaded only when asked for, so that
    ``Session.merge`` of an object that was read earlier leaves them as they are.
    """

    @declared_attr
    def leased_until(self) -> Mapped[object]:
        """Until when the row is leased: a time; in SQLite, seconds since 1970."""
        kind = TIMESTAMP(timezone=True).with_variant(REAL(), "sqlite").with_variant(DATETIME(fsp=6), "mysql", "mariadb")
        return mapped_column(kind, nullable=False, server_default=_Never(), deferred=True)

    @declared_attr
    def lease_token(self) -> Mapped[int]:
        """Token of the last claim."""
        return mapped_column(BigInteger(), nullable=False, server_default=text("0"), deferred=True)

    @classmethod
    def __leased_rows__(cls, dialect: str) -> _AlchemySql:
        return _AlchemySql(cls, dialect)


class _AlchemySql:
    """Expressions of SQLAlchemy as parts of statements."""

    faults = (SQLAlchemyError, NotImplementedError)

    def __init__(self, model: type, dialect: str) -> None:
        self._mapper: Any = inspect(model)
        self.table = str(self._mapper.local_table.fullname)
        columns: Any = self._mapper.local_table.primary_key.columns
        self.keys = [str(each.name) for each in columns]
        kind: Any = make_url(_DRIVERS[dialect]).get_dialect()
        self._dialect = kind(paramstyle="named", dbapi=kind.import_dbapi())

    def where(self, part: Any) -> Part:
        if isinstance(part, bool):
            msg = f"a condition such as Job.state == 'queued' is expected, not {part}"
            raise TypeError(msg)
        return self._write(and_(part))

    def order(self, part: Sequence[Any]) -> Part:
        """Write columns, or what their ``desc()`` returns."""
        return self._write(ClauseList(*part, group=False))

    def on_claim(self, part: Mapping[Any, Any]) -> Part:
        """Write assignments. A key is a column, or the name of its attribute."""
        sets: list[Any] = []
        for key, value in part.items():
            if (target := self._mapper.columns.get(getattr(key, "key", key))) is None:
                msg = f"{key!s} is no column of the model"
                raise TypeError(msg)
            sets.append(column(target.name, target.type).op("=")(value))
        return self._write(ClauseList(*sets, group=False))

    def _write(self, clause: ClauseElement) -> Part:
        compiled: Any = clause.compile(dialect=self._dialect)
        written = compiled.construct_expanded_state()  # each value of an IN has a name of its own
        kinds = {name: bound.type.dialect_impl(self._dialect) for bound, name in compiled.bind_names.items()}
        for name, expanded in written.parameter_expansion.items():
            kinds.update(dict.fromkeys(expanded, kinds[name]))
        convert = {name: kind.bind_processor(self._dialect) or (lambda value: value) for name, kind in kinds.items()}
        return written.statement, {name: convert[name](value) for name, value in written.parameters.items()}
