"""The promises of a backend and of a guard; `BackendSuite` and `GuardSuite` are all of them."""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
