"""The folder of the hook by which PyInstaller packs this package: see the entry point in pyproject.toml."""


def hook_dirs() -> list[str]:
    """Return the folders in which PyInstaller looks for hooks."""
    return list(__path__)
