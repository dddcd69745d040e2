"""`fencing_sdk.testing` costs nothing until a name is asked for, and says what is missing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fencing_sdk import testing


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_of_the_door_is_there(name: str):
    assert getattr(testing, name).__name__ == name
    assert name in dir(testing)


def test_type_checkers_see_the_same_names():
    source = Path(testing.__file__).read_text()
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    seen = {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(testing.__all__) == set(testing._HOMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = testing.Nonsense


def test_opening_the_door_loads_neither_pytest_nor_a_suite():
    loaded = python("import sys, fencing_sdk.testing; print(*sys.modules)").split()
    assert "pytest" not in loaded
    assert not [name for name in loaded if name.startswith("fencing_sdk.testing.")]


@pytest.mark.parametrize("suite", ["BackendSuite", "GuardSuite"])
def test_without_pytest_a_suite_names_the_extra_to_install(suite: str):
    code = f"""
import sys
sys.modules["pytest"] = None
from fencing_sdk import ConfigurationError
try:
    from fencing_sdk.testing import {suite}
except ConfigurationError as error:
    print(error)
"""
    assert (
        python(code).strip()
        == f"{suite} needs pytest; run: pip install 'fencing-sdk[testing]', or '.[testing]' in a checkout"
    )


@pytest.mark.parametrize("name", ["FaultyBackend", "World"])
def test_without_pytest_the_rest_still_works(name: str):
    python(f"import sys; sys.modules['pytest'] = None; from fencing_sdk.testing import {name}")
