"""Includes the files with facts in a program that PyInstaller freezes, and what it cannot find."""  # noqa: N999  its name for a hook

from typing import Final

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

datas: Final = collect_data_files("otel_limits", includes=["**/*.yaml"])

hiddenimports: Final = [
    *collect_submodules("otel_limits.bindings"),
    *collect_submodules("otel_limits.quotas"),
]
"""Modules that are imported by name, on first use."""
