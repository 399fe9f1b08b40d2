"""The price list in a process: what is imported, kept in memory, fetched and forked."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.price_list import listed
from tests.unit.core.test_price_lookup import run

FORK = """
import os, signal, sys, threading, warnings
from otel_limits.core.usage import Usage
from otel_limits.core.price_lookup import Prices
from otel_limits.vendors.records import vendors
prices = Prices()
threading.Thread(target={load}).start()
while {package!r} not in sys.modules:
    pass
warnings.simplefilter("ignore", DeprecationWarning)  # the test forks a multi-threaded process
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(prices.price("gpt-4o", Usage(input=1)) is None)
assert os.waitpid(child, 0)[1] == 0
"""


@listed
@pytest.mark.parametrize(
    ("load", "package"), [("prices.load", "genai_prices"), ("vendors", "yaml")]
)
def test_a_fork_in_the_middle_of_loading_has_prices(load: str, package: str) -> None:
    """A child that is forked while a thread imports a package does not wait for that thread."""
    run(FORK.format(load=load, package=package))


BUILT_ONCE = """
import gc
from genai_prices import Usage as OwnUsage, calc_price
from genai_prices.types import Provider
from otel_limits.core.price_lookup import Prices
from otel_limits.core.usage import Usage
prices = Prices()
assert prices.price("gpt-4o", Usage(input=1)) and prices.price("o3", Usage(input=1))
assert prices.price("no-such-model", Usage(input=1)) is None
calc_price(OwnUsage(input_tokens=1), "gpt-4o")
from genai_prices.data import providers
assert len([each for each in gc.get_objects() if isinstance(each, Provider)]) == len(providers)
"""


@listed
def test_the_list_is_in_memory_once() -> None:
    """Also if the application has the package calculate prices itself."""
    run(BUILT_ONCE)


WITHOUT_BYTECODE = """
import importlib.machinery
compiled = []
compile_source = importlib.machinery.SourceFileLoader.get_code
def get_code(loader, name):
    compiled.append(name)
    return compile_source(loader, name)
importlib.machinery.SourceFileLoader.get_code = get_code
from otel_limits.core.usage import Usage, measured
from otel_limits.core.price_lookup import Prices
for model in ("gpt-4o", "o3", "no-such-model"):
    Prices().price(model, Usage(input=1))
assert compiled.count("genai_prices.data") == 1
"""


@listed
def test_the_code_of_the_list_is_read_once() -> None:
    """Where no bytecode is kept on the disk, it would be compiled for each model."""
    run(WITHOUT_BYTECODE)


FETCHED = """
import sys
import sysconfig
from genai_prices.data_snapshot import DataSnapshot, set_custom_snapshot
from otel_limits.core.usage import Usage, measured
from otel_limits.core.price_lookup import Prices
set_custom_snapshot(DataSnapshot([], from_auto_update=True))
assert Prices().price("gpt-4o", Usage(input=1)) is None
assert "genai_prices.data" not in sys.modules
"""


@listed
def test_fetched_price_list_replaces_the_packages() -> None:
    """Even if the bundled list was never read before."""
    run(FETCHED)


def test_nothing_is_loaded_before_the_first_price() -> None:
    """Neither the library nor a list of prices loads the package, or any facts about vendors."""
    run(
        "import sys, otel_limits, otel_limits.usage.media, otel_limits.usage.normaliser\n"
        "from otel_limits.core.price_lookup import Prices\n"
        "Prices().version\n"
        "assert not {'genai_prices', 'yaml'} & sys.modules.keys()"
    )


WHOLE = """
import sys
import otel_limits
from otel_limits.testing import ScriptedModel, says
from strands import Agent
class Client(ScriptedModel):
    def stream(self, *args, **kwargs):
        assert hasattr(sys.modules["httpx2"], "Client")
        return super().stream(*args, **kwargs)
otel_limits.enable(max_turns=3)
assert "genai_prices" not in sys.modules
Agent(model=Client([says("Done.")]), callback_handler=None)("go")
"""


@listed
def test_models_find_the_http_client_of_the_package_imported_whole() -> None:
    """OpenAI's client looks into `sys.modules` for it, and fails if it is only partly imported."""
    run(WHOLE)


@listed
def test_nothing_is_fetched() -> None:
    """A price is found without a connection or a look-up of a name."""
    run(
        "import sys\n"
        "from otel_limits.core.usage import Usage\n"
        "from otel_limits.core.price_lookup import Prices\n"
        "used = []\n"
        "sys.addaudithook(lambda event, _: used.append(event) if 'socket' in event else None)\n"
        "assert Prices().price('gpt-4o', Usage(input=1)) is not None\n"
        "assert not {'socket.connect', 'socket.getaddrinfo', 'socket.sendto'} & set(used), used"
    )


FROZEN = """
import sys
sys.path += sys.argv[1:]
import otel_limits
otel_limits.enable(max_turns=3, children=False)
from strands import Agent
from otel_limits.testing import ScriptedModel, endless, uses
model = ScriptedModel(endless(uses("search")), model_id="gpt-4o")
print(Agent(model=model, callback_handler=None)("go").stop_reason, model.calls)
try:
    otel_limits.enable(max_cost_usd=1, children=False)
except otel_limits.ConfigurationError as error:
    print(error)
"""


@listed
def test_frozen_program_without_metadata_is_limited(tmp_path: Path) -> None:
    """PyInstaller omits the files that name a version, without which genai-prices fails to import.

    So there is no price list, and nothing else is affected.
    """
    without = ("genai_prices-", "otel_limits-", "strands_agents-")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(without):
            (tmp_path / path.name).symlink_to(path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", FROZEN, str(ROOT), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    limited, refused = done.stdout.splitlines()
    assert limited == "max_turns 3"
    assert "max_cost_usd needs prices, and there are none." in refused
    assert "PackageNotFoundError" not in done.stderr
