#!/usr/bin/env bash
# mypy 2.4.1 (mypyc), setuptools 80.9.0, fastapi 0.121.0, httpx 0.28.1; Python 3.11.7; needs a C compiler.
#
# A coroutine function that mypyc has compiled passes `inspect.iscoroutinefunction`, and has an empty `inspect.signature`,
# whatever it takes; a compiled plain function has its own. A decorator that binds arguments, to name a lock or a cache key
# by them, refuses each call that Python takes. A compiled endpoint of FastAPI loses its parameters without a word: a
# required one is not in OpenAPI, is not passed, and the request is a TypeError.
#
# Seen:
#   plain (report_id), coroutine (), bind: TypeError, call: 7; FastAPI: parameters [], PUT raises TypeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/venv"
uv pip install --quiet --python "$folder/venv" mypy==2.4.1 setuptools==80.9.0 fastapi==0.121.0 httpx==0.28.1
cd "$folder"
cat >compiled.py <<'PYTHON'
def plain(report_id: int) -> int:
    return report_id


async def coroutine(report_id: int) -> int:
    return report_id
PYTHON
PATH="$folder/venv/bin:$PATH" venv/bin/mypyc compiled.py >/dev/null
venv/bin/python - <<'PYTHON'
import asyncio
import inspect

import compiled
from fastapi import FastAPI
from fastapi.testclient import TestClient

assert compiled.__file__.endswith(".so")
assert inspect.iscoroutinefunction(compiled.coroutine)
plain, coroutine = inspect.signature(compiled.plain), inspect.signature(compiled.coroutine)
called = asyncio.run(compiled.coroutine(7))
try:
    coroutine.bind(7)
    bind = "ok"
except TypeError:
    bind = "TypeError"

app = FastAPI()
app.put("/reports")(compiled.coroutine)
parameters = app.openapi()["paths"]["/reports"]["put"].get("parameters", [])
try:
    TestClient(app).put("/reports?report_id=7")
    answer = "answers"
except TypeError:
    answer = "raises TypeError"
print(f"plain {plain}, coroutine {coroutine}, bind: {bind}, call: {called}; FastAPI: parameters {parameters}, PUT {answer}")
assert (str(plain), str(coroutine), bind, called) == ("(report_id)", "()", "TypeError", 7)
assert (parameters, answer) == ([], "raises TypeError")
PYTHON
