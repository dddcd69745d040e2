#!/usr/bin/env bash
# PyInstaller 6.22.3 with pyinstaller-hooks-contrib 2026.9, asyncmy 0.2.18; Python 3.13.0.
#
# asyncmy is compiled, and PyInstaller reads no imports in compiled modules. So `import asyncmy` works where the program is
# packed and fails in the packed program, which names a module that nobody has heard of and that pip would not bring.
# Pack with --collect-submodules=asyncmy.
#
# Seen:
#   packed as it is: No module named 'asyncmy.constants.FIELD_TYPE'
#   packed with --collect-submodules=asyncmy: ok
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python "${PYTHON:-3.13}" "$folder/venv"  # one with a shared library, as PyInstaller wants it
uv pip install --quiet --python "$folder/venv" asyncmy==0.2.18 pyinstaller==6.22.3 pyinstaller-hooks-contrib==2026.9
cd "$folder"
cat > program.py <<'PROGRAM'
import asyncio

try:
    import asyncmy
except ModuleNotFoundError as error:
    print(error)
else:
    print("ok")
PROGRAM
packed() {
    venv/bin/pyinstaller --noconfirm --log-level ERROR "$@" program.py >&2
    dist/program/program
}
first=$(packed)
second=$(packed --collect-submodules=asyncmy)
echo "packed as it is: $first"
echo "packed with --collect-submodules=asyncmy: $second"
[[ $first == "No module named 'asyncmy."* && $second == ok ]]
