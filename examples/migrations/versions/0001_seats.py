"""The table of the seats."""

import os

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    print(f"worker {os.getpid()} applies 0001", flush=True)
    op.create_table("seats", sa.Column("number", sa.Integer, primary_key=True))


def downgrade() -> None:
    op.drop_table("seats")
