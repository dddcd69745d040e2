"""Packs what no import statement names: stores, which URLs name, with their scripts, their checks, and plugins."""

from PyInstaller.utils.hooks import collect_data_files, collect_entry_point, collect_submodules

from fencing_sdk.backends import BUILTIN, GROUP, ROWS
from fencing_sdk.diagnosis.checks import STORES

plugin_datas, plugins = collect_entry_point(GROUP)
datas = [*collect_data_files("fencing_sdk"), *plugin_datas]
hiddenimports = sorted(
    {builtin.module for builtin in (*BUILTIN.values(), ROWS)}
    | {f"fencing_sdk.diagnosis.{module}" for module, _ in STORES.values()}
    | {*plugins}
    | {*collect_submodules("asyncmy")}  # whose C code imports them
)
