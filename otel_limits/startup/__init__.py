"""Modules that Python imports at its start, before a program and without the rest of the package.

In: the environment of a process, and each import of a framework.
Out: one call of a function of `runtime`, by name, when a framework was imported.
May touch: `sys.meta_path` and the standard library, in the words of Python 3.6.
"""
