"""User configuration: environment variables and the policy file.

A value such as `max_turns: 30` takes this way:

1. `table.py` has one entry per setting. Its name makes the variable, the option and the key of the
   policy file; its kind (`core/values.py`) checks a value from any of them.
2. `settings_reader.py` reads the variables of the process into `Settings`. Options of
   `otel-limits run` become variables of the program.
3. `policy/` reads the file: `yaml_tree.py` finds values and their lines, `models.py` checks them,
   `reader.py` makes a `Document` of them, which `file.py` renews when the file changes.
4. `Document.effective` adds the values of the file to those of the process, at the start of each
   invocation. The result is the `Policy` to which it is held.

From weak to strong: default, preset, variable, argument of `enable()`, `defaults` of the file,
`agents` of the file, `LimitsPlugin`.

A wrong value is one sentence in `Reading.mistakes` or `PolicyFile.mistakes`. `enable()` raises all
of them; `run`, `check` and `doctor` print them; elsewhere each is logged, and the valid variables
apply. A file applies as a whole, or its previous version does.
"""
