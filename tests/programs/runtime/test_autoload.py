"""`otel-limits autoload`: one line in an environment limits every Python of it."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import sysconfig
import timeit
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli import main
from otel_limits.runtime import autoload
from otel_limits.runtime.autoload import MODULE, PTH, START, AutoloadError, install_autoload
from tests.launching import (
    ENDLESS,
    INSTRUMENT,
    NO_EXPORT,
    PACKAGES,
    RUN,
    WITHOUT_EXPORTER,
    execute,
    link_packages,
)
from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.launching import Ended

FIRST = "_packages.pth"
"""Read before every other file of its kind."""
WITHOUT_QUIET = ("env", "-u", "OTEL_LIMITS_QUIET")
"""Begins a command where really nothing is set: these tests ask for quiet everywhere."""

MODULES = "import sys; print('otel_limits_startup' in sys.modules, 'otel_limits' in sys.modules)"
CAP = {"OTEL_LIMITS_MAX_TURNS": "3", "OTEL_LIMITS_LEDGER": "none"}


class Environment:
    """A virtual environment that has what this one has."""

    def __init__(self, path: Path) -> None:
        """Make it; only its own files are written."""
        venv.create(path, symlinks=True)
        self.python = str(path / "bin" / "python")
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(path)}))
        self.fill()

    def fill(self) -> None:
        """Install everything."""
        (self.site / FIRST).write_text(f"{ROOT}\n{PACKAGES}\n")

    def leave(self, *directories: Path) -> None:
        """Uninstall everything but for the line and the packages in these directories."""
        (self.site / FIRST).write_text("".join(f"{each}\n" for each in directories))

    def leave_out(self, packages: Path, *names: str) -> None:
        """Uninstall everything whose name begins with one of these.

        Args:
            packages: An empty directory, for links to all others.
            names: The beginnings of names of packages and of their metadata.
        """
        link_packages(packages, *names)
        self.leave(ROOT, packages)

    @property
    def line(self) -> Path:
        """The file that is spoken of."""
        return self.site / "otel_limits_autoload.pth"

    def autoload(self, *command: str) -> Ended:
        """Do something to the line."""
        return execute(self.python, "-m", "otel_limits.cli", "autoload", *command)


@pytest.fixture(scope="module")
def environment(only_strands: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that autoloads."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.leave(ROOT, only_strands)
    assert made.autoload("install").status == 0
    return made


@pytest.fixture
def bare(only_strands: Path, tmp_path: Path) -> Environment:
    """An environment without the line."""
    made = Environment(tmp_path / "bare")
    made.leave(ROOT, only_strands)
    return made


def halted(ended: Ended) -> bool:
    """Return whether the cap held: counted once, and published once."""
    assert ended.status == 0, ended.log
    assert sum("halted by" in line for line in ended.log.splitlines()) == 1
    assert ended.events["samples"]["otel_limits_turns_total endless"] == 3
    return (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)


# --- the command ----------------------------------------------------------------------------------


def test_install_writes_one_plain_line_and_shows_it(bare: Environment) -> None:
    """The output names the change."""
    ended = bare.autoload("install")
    assert (ended.status, ended.log) == (0, "")
    assert ended.output == f"Wrote {bare.line}:\n{PTH}"
    assert bare.line.read_text() == PTH
    assert PTH.count("\n") == 1
    assert not any(word in PTH for word in ("exec", "eval", "compile", "base64", "decode"))


def test_install_leaves_nothing_else_behind(bare: Environment) -> None:
    """No draft of the file, and a second time changes nothing."""
    for _ in range(2):
        bare.autoload("install")
        ours = sorted(path.name for path in bare.site.iterdir() if "limits" in path.name)
        assert ours == [bare.line.name, MODULE.name]


def test_status_shows_whether_autoload_is_installed(bare: Environment) -> None:
    """A script can ask: 0 for there, 1 for not there or not this version's."""
    assert (bare.autoload("status").status, bare.line.exists()) == (1, False)
    bare.autoload("install")
    assert bare.autoload("status").output == f"Installed: {bare.line}\n"
    bare.line.write_text("import os\n")
    outdated = bare.autoload("status")
    assert (outdated.status, "Outdated: " in outdated.output) == (1, True)


def test_remove_deletes_it(bare: Environment) -> None:
    """Again is harmless."""
    bare.autoload("install")
    assert bare.autoload("remove").output == f"Removed: {bare.line}\n"
    assert [str(path) for path in bare.site.rglob("*limits*")] == []
    again = bare.autoload("remove")
    assert (again.status, again.output) == (0, "Not installed.\n")


def test_check_shows_autoload(environment: Environment, bare: Environment) -> None:
    """On a separate line, and absent otherwise."""
    there = execute(environment.python, "-m", "otel_limits.cli", "check").output
    assert ["autoload", "installed", str(environment.line)] in map(str.split, there.splitlines())
    assert "autoload" not in execute(bare.python, "-m", "otel_limits.cli", "check").output


def test_own_commands_are_not_limited(environment: Environment) -> None:
    """It looks at what it imports of a framework, and the port is that of the agents."""
    with socket.socket() as agents:
        agents.bind(("127.0.0.1", 0))
        agents.listen()
        port = str(agents.getsockname()[1])
        variables = {**CAP, "OTEL_LIMITS_PROMETHEUS_PORT": port}
        ended = execute(environment.python, "-m", "otel_limits.cli", "check", **variables)
    assert (ended.status, ended.log) == (0, "")


def test_doctor_shows_autoload(environment: Environment) -> None:
    """It proves it, too: the cap holds under a plain python that has the line."""
    ended = execute(*(environment.python, "-m", "otel_limits.cli", "doctor", "--json"))
    found = {each["name"]: each for each in json.loads(ended.output)["findings"]}
    shown = found["autoload"]["status"], found["autoload"]["text"]
    assert shown == ("ok", f"Installed: {environment.line}")
    assert found["runaway"]["status"] == "ok"


# --- who is refused -------------------------------------------------------------------------------


def test_an_installation_outside_the_environment_is_refused(bare: Environment) -> None:
    """As one in the user's site is, python -I would not find it."""
    bare.leave()
    ended = execute(
        *(bare.python, "-m", "otel_limits.cli", "autoload", "install"),
        PYTHONPATH=f"{ROOT}{os.pathsep}{PACKAGES}",
    )
    assert (ended.status, bare.line.exists()) == (2, False)
    assert "which python -I ignores. Install it into a virtual environment." in ended.log


def test_an_environment_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the path and what the system says."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(autoload, "autoload_file", lambda: tmp_path / "file" / "line.pth")
    with pytest.raises(AutoloadError, match=r"line\.pth cannot be written: Not a directory\. Run"):
        install_autoload(os.environ, {})


def test_an_environment_that_the_system_manages_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the mark that PEP 668 defines; a virtual environment made from it is not meant."""
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    with pytest.raises(AutoloadError, match="managed by the operating system"):
        install_autoload(os.environ, {})
    assert [path.name for path in tmp_path.iterdir()] == ["EXTERNALLY-MANAGED"]


def test_a_directory_whose_files_python_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The line is tried before success is claimed, and taken away again."""
    monkeypatch.setattr(autoload, "autoload_file", lambda: tmp_path / "line.pth")
    with pytest.raises(AutoloadError, match="does not read"):
        install_autoload(os.environ, {})
    assert list(tmp_path.iterdir()) == []


# --- what it does ---------------------------------------------------------------------------------

WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "plain": ((), (), {}),
    "isolated": ((), ("-I",), {}),
    "no environment": ((), ("-E",), {}),
    "instrument": (INSTRUMENT, (), NO_EXPORT),
    "instrument without exporter": (INSTRUMENT, (), WITHOUT_EXPORTER),
    "run": (RUN, (), {}),
    "run, isolated": ((*RUN, "--"), ("-I",), {}),
    "tracer provider": ((), (), {"OTEL_PYTHON_TRACER_PROVIDER": "otel_limits"}),
}
"""Arguments before and after the interpreter, and variables."""


@pytest.mark.parametrize("way", WAYS)
def test_the_cap_holds_without_a_launcher_and_beside_each(
    environment: Environment, way: str
) -> None:
    """Enabled once, by the first that loads."""
    front, options, variables = WAYS[way]
    ended = execute(*front, environment.python, *options, ENDLESS, **CAP, **variables)
    assert halted(ended)
    if way in ("plain", "run"):  # the program sets no provider
        assert ended.events["provider"] == "FallbackProvider"


def test_a_provider_that_the_program_sets_wins(environment: Environment) -> None:
    """The cap holds by its spans."""
    ended = execute(environment.python, ENDLESS, "--own-provider", **CAP)
    assert halted(ended)
    assert "otel_limits_unsampled_invocations_total endless" not in ended.events["samples"]


def test_disabled_switches_it_off(environment: Environment) -> None:
    """Nothing is limited."""
    ended = execute(environment.python, ENDLESS, OTEL_LIMITS_DISABLED="true", **CAP)
    assert ended.events["model_calls"] > 3


def test_a_mistake_does_not_switch_it_off(environment: Environment) -> None:
    """It is reported, and every other setting applies."""
    ended = execute(environment.python, ENDLESS, OTEL_LIMITS_ACTION="explode", **CAP)
    assert halted(ended)
    assert "OTEL_LIMITS_ACTION must be" in ended.log


def test_misspelled_prefix_alone_is_reported(environment: Environment) -> None:
    """No limit is set then, so the reason must be logged."""
    ended = execute(environment.python, ENDLESS, OTEL_LIMITS_QUIET="", OTEL_LIMIT_MAX_TURNS="3")
    assert ended.events["model_calls"] > 3
    assert ended.log.count("Did you mean OTEL_LIMITS_MAX_TURNS?") == 1


def test_nothing_is_imported_where_nothing_is_set(environment: Environment) -> None:
    """Not even the module that waits."""
    assert execute(*WITHOUT_QUIET, environment.python, "-c", MODULES).output == "False False\n"


def test_a_program_without_agents_imports_nothing_of_the_package(environment: Environment) -> None:
    """Only the module that waits."""
    assert execute(environment.python, "-c", MODULES, **CAP).output == "True False\n"


def test_an_agent_without_any_setting_is_left_alone(environment: Environment) -> None:
    """An empty variable is unset."""
    program = "import strands.agent.agent, otel_limits.runtime.runtime as r; print(r.RUNTIME.is_on)"
    empty = execute(*WITHOUT_QUIET, environment.python, "-c", program, OTEL_LIMITS_MAX_TURNS="")
    assert empty.output == "False\n"
    assert execute(environment.python, "-c", program, **CAP).output == "True\n"


def test_the_line_costs_nearly_nothing_where_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under 0.2 ms in every Python that starts, compiling it included."""
    for name in list(os.environ):
        if name.startswith("OTEL_LIM"):
            monkeypatch.delenv(name)
    code = compile(f"exec({PTH!r})", "line", "exec")  # as the module `site` does
    best = min(timeit.repeat(lambda: exec(code), number=10, repeat=20)) / 10  # noqa: S102
    assert best < 0.000_2


# --- what is left after an uninstallation ---------------------------------------------------------

IMPORTS = "import strands.agent.agent; print('ran')"
"""A program with agents: it ends before it has any."""


@pytest.fixture(scope="module")
def orphan(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment that otel-limits was uninstalled from, but not its line."""
    made = Environment(tmp_path_factory.mktemp("orphan"))
    made.autoload("install")
    made.leave(PACKAGES)
    return made


@pytest.mark.parametrize("program", [IMPORTS, "print('ran')"])
def test_the_line_that_is_left_is_silent_where_nothing_is_set(
    orphan: Environment, program: str
) -> None:
    """Programs without limits must not be disturbed."""
    ended = execute(*WITHOUT_QUIET, orphan.python, "-c", program)
    assert (ended.output, ended.log) == ("ran\n", "")


def test_leftover_line_is_silent_in_a_program_without_agents(orphan: Environment) -> None:
    """Even under strict: it may be pip, which could repair the installation."""
    ended = execute(orphan.python, "-c", "print('ran')", OTEL_LIMITS_STRICT="true", **CAP)
    assert (ended.status, ended.output, ended.log) == (0, "ran\n", "")


@pytest.mark.parametrize(("strict", "status", "output"), [("", 0, "ran\n"), ("true", 2, "")])
def test_leftover_line_reports_agents_that_are_not_limited(
    orphan: Environment, strict: str, status: int, output: str
) -> None:
    """Under strict, the program ends before it has an agent. The command is gone, too."""
    ended = execute(orphan.python, "-c", IMPORTS, OTEL_LIMITS_STRICT=strict, **CAP)
    assert (ended.status, ended.output) == (status, output)
    (sentence,) = ended.log.splitlines()
    assert sentence.startswith(
        "otel-limits: limits are not enforced: otel-limits cannot be imported in "
        f"{orphan.python} (No module named 'otel_limits"
    )
    files = "otel_limits_autoload.pth and otel_limits_startup.py"
    assert sentence.endswith(f"Install otel-limits there, or delete {files} in {orphan.site}.")


# --- settings that are kept -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment that keeps settings."""
    made = Environment(tmp_path_factory.mktemp("keeping"))
    policy = made.site / "limits.yaml"
    policy.write_text("agents:\n  other: {limits: {max_turns: 9}}\n")
    ended = execute(
        *("env", "--chdir", str(made.site), made.python, "-m", "otel_limits.cli", "autoload"),
        *("install", "--policy", policy.name, "--set", "max-turns=3"),
        *("--set", "OTEL_LIMITS_QUIET=true", "--set", "ledger=spend.db"),
    )
    assert ended.status == 0, ended.log
    moved = "OTEL_LIMITS_LEDGER, OTEL_LIMITS_POLICY"
    assert ended.output.endswith(f"Kept as absolute paths: {moved}.\n")
    return made


NOTHING = ("env", "-i")
"""Begins a command without any variable, as cron and systemd start it."""


def test_kept_settings_limit_a_program_without_variables(keeping: Environment) -> None:
    """Cron has its own environment, and most containers' entry points a part of it."""
    assert halted(execute(*NOTHING, keeping.python, "-I", ENDLESS))


def test_variable_overrides_kept_setting(keeping: Environment) -> None:
    """One with a value: an empty variable is unset, as everywhere."""
    for text, calls in (("5", 5), ("", 3)):
        ended = execute(*NOTHING, f"OTEL_LIMITS_MAX_TURNS={text}", keeping.python, ENDLESS)
        assert ended.events["model_calls"] == calls


def test_status_shows_kept_settings_which_an_upgrade_keeps(keeping: Environment) -> None:
    """Installing again after an upgrade must not remove limits."""
    again = keeping.autoload("install")
    status = keeping.autoload("status")
    kept = (
        f"OTEL_LIMITS_MAX_TURNS=3\nOTEL_LIMITS_QUIET=true\n"
        f"OTEL_LIMITS_LEDGER={keeping.site / 'spend.db'}\n"
        f"OTEL_LIMITS_POLICY={keeping.site / 'limits.yaml'}\n"
    )
    assert again.output.endswith(kept)
    assert status.output == f"Installed: {keeping.line}\n{kept}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--set", "max_turns=0"), "OTEL_LIMITS_MAX_TURNS must be a whole number of 1 or more"),
        (("--set", "max_turn=3"), "OTEL_LIMITS_MAX_TURN is not a setting of otel-limits."),
        (("--set", "max_turns"), "OTEL_LIMITS_MAX_TURNS has no value."),
        (("--set", "agent=a\nb"), "OTEL_LIMITS_AGENT must be one line."),
        (("--set", "prometheus_authorization=Bearer x"), "_AUTHORIZATION contains a secret"),
        (("--set", "quota_store=redis://:x@host"), "OTEL_LIMITS_QUOTA_STORE contains a secret"),
        (("--policy", "/missing.yaml"), "/missing.yaml"),
    ],
)
def test_setting_that_cannot_be_kept_is_refused(
    options: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, so that no program starts with half of its settings."""
    assert main(["autoload", "install", *options]) == 2
    assert sentence in capsys.readouterr().err
    assert autoload.installed_autoload() is None


# --- other packages -------------------------------------------------------------------------------


def test_agents_imported_by_an_earlier_line_are_limited(environment: Environment) -> None:
    """A package may import Strands in its own .pth file."""
    earlier = environment.site / "a_other.pth"
    earlier.write_text("import strands\n")
    try:
        assert halted(execute(environment.python, ENDLESS, **CAP))
    finally:
        earlier.unlink()


# --- Python 3.15 ----------------------------------------------------------------------------------


def test_a_start_file_names_a_function_that_is_there() -> None:
    """As `pkgutil.resolve_name` reads it, next to the module: PEP 829."""
    module, _, name = START.strip().partition(":")
    assert callable(runpy.run_path(str(MODULE))[name])
    assert module == MODULE.stem


def test_python_3_15_gets_a_start_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its .pth files are on the way out."""
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert autoload.autoload_file().name == "otel_limits_autoload.start"
