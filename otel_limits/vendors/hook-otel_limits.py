"""Includes the files with facts in a program that PyInstaller freezes."""  # noqa: N999  its name for a hook

from typing import Final

from PyInstaller.utils.hooks import collect_data_files

datas: Final = collect_data_files("otel_limits", includes=["**/*.yaml"])
