"""Who has a seat."""

import os

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    print(f"worker {os.getpid()} applies 0002", flush=True)
    op.add_column("seats", sa.Column("holder", sa.Text))


def downgrade() -> None:
    op.drop_column("seats", "holder")
