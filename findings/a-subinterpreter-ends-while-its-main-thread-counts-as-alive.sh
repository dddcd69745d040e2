#!/usr/bin/env bash
# Python 3.14.10 and 3.15.2 (concurrent.interpreters, concurrent.futures.InterpreterPoolExecutor).
#
# A subinterpreter allows no daemon thread, so one that renews a lock has to be a plain thread, and has to end by itself:
# closing the interpreter waits for it. The usual sign is `threading.main_thread().is_alive()`, which is False in a process
# as soon as its main thread has run to its end. In a subinterpreter it stays True while that is closed, so that a thread
# which goes by it keeps `Interpreter.close()`, and the end of the pool, waiting. Only what
# `threading._register_atexit` was given is called before the wait, and functions of `atexit` come after it.
#
# Seen (the thread looks for two seconds at most):
#   subinterpreter: the main thread counts as alive
#   main interpreter: the main thread counts as ended
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python '>=3.14,<3.16' "$folder/venv"
cat >"$folder/ends.py" <<'PYTHON'
from concurrent import interpreters

CODE = """
import threading
import time


def look() -> None:
    end = time.monotonic() + 2
    while threading.main_thread().is_alive() and time.monotonic() < end:
        time.sleep(0.05)
    state = "alive" if threading.main_thread().is_alive() else "ended"
    print(f"{who}: the main thread counts as {state}", flush=True)


threading.Thread(target=look).start()
"""

interpreter = interpreters.create()
interpreter.prepare_main(who="subinterpreter")
interpreter.exec(CODE)
interpreter.close()
exec(CODE, {"who": "main interpreter"})
PYTHON
"$folder/venv/bin/python" "$folder/ends.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
subinterpreter: the main thread counts as alive
main interpreter: the main thread counts as ended
SEEN
