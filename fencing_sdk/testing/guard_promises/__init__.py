"""The promises of a guard, one module per topic; `fencing_sdk.testing.GuardSuite` is all of them."""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
