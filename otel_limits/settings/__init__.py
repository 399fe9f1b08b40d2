"""User configuration: environment variables and the policy file.

In: the environment, and a policy file.
Out: the settings of a process, the policy of an agent, and one sentence for each mistake.
May touch: `os.environ`, which no other room reads, and files, with `yaml`.

A value such as `max_turns: 30` takes this path:

1. A limit is declared in `LIMITS` (`core/limits.py`), a setting that can differ by agent in
   `Policy` (`core/policy.py`), any other in `Settings` (`table.py`). `SETTINGS` in `table.py` lists
   all of them. The name of each makes its variable, its option and, except for a setting of the
   process, its key in the policy file; its kind (`core/values.py`) checks a value from any of them.
2. `settings_reader.py` reads the variables of the process into `Settings`. Options of
   `otel-limits run` become variables of the program.
3. `policy/` reads the file: `reader.py` finds values and their lines, checks them, and makes a
   `Document` of them, which `file.py` reloads when the file changes.
4. `Document.effective` merges the file over the settings of the process when an invocation starts
   (`Runtime.policy`), and `Overrides` of a plugin over both. The result is the `Policy` that
   applies to it.
5. The JSON Schema of the file is made from the same models and help texts (`reader.py`, and
   `tests/policy_schema.py`, which writes it).

Precedence, lowest first: default, preset, variable, argument of `enable()`, `defaults` of the file,
`agents` of the file, `LimitsPlugin`.

A wrong value is one sentence in `Reading.mistakes` or `PolicyFile.mistakes`. `enable()` raises all
of them; `run`, `check` and `doctor` print them; elsewhere each is logged, and the valid variables
apply, or the process exits with status 2 under `OTEL_LIMITS_STRICT=true`. A file applies as a
whole, or its previous version does.
"""
