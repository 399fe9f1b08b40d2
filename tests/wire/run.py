"""Calls every vendor in every case and every mode, and writes the counts as one JSON object.

`python -m tests.wire.run PATH VENDOR ...` uses one process for each mode, forked from one that has
imported the clients of these vendors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY
from pydantic import BaseModel
from strands import Agent

from tests.wire import caps
from tests.wire.cases import CASES, MAX_TURNS, Ask
from tests.wire.providers import BY_NAME, Provider
from tests.wire.server import Vendor, serving
from tests.wire.usages import PRICES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from strands.models import Model

MODES: Final = ("spans", "hooks", "disabled")
"""With an SDK, without one, and with one disabled by `OTEL_SDK_DISABLED`."""

CAPPED: Final = "capped"
"""Key of the results under exact caps."""

Results = dict[str, dict[str, dict[str, Any]]]
"""The counts by mode, vendor and case; under `CAPPED` by vendor and cap."""


class Report(BaseModel):
    """The structured output that is requested."""

    text: str


def results(vendors: Iterable[str] = tuple(BY_NAME)) -> Results:
    """Make all calls to vendors in a separate process and return the counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.wire.run", str(path), *vendors],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
        assert done.returncode == 0, done.stderr[-5_000:]
        found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


PICO: Final = 10**12
COUNTED: Final = tuple(
    f"otel_limits_{name}_total" for name in ("model_calls", "tokens", "cached_tokens", "cost_usd")
)

ENVIRONMENT: Final = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}


def main(path: str, vendors: Sequence[str]) -> None:
    """Fork a process for each mode, and write the counts of all of them."""
    providers = [BY_NAME[name] for name in vendors]
    import_clients(providers)
    with tempfile.TemporaryDirectory() as folder:
        children = {mode: fork(mode, Path(folder), providers) for mode in MODES}
        failed = [mode for mode, child in children.items() if os.waitpid(child, 0)[1]]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        found = {
            name: json.loads(Path(folder, name).read_text(encoding="utf-8"))
            for name in (*MODES, CAPPED)
        }
    Path(path).write_text(json.dumps(found), encoding="utf-8")


def import_clients(providers: Sequence[Provider]) -> None:
    """Import the dependencies of all models, once for all modes."""
    # Nothing here is encrypted, and each client would read the certificates of all authorities.
    vars(ssl)["create_default_context"] = functools.cache(ssl.create_default_context)
    for provider in providers:
        provider.make("http://127.0.0.1:9")
    import genai_prices  # noqa: F401
    import opentelemetry.sdk.trace  # noqa: F401

    import otel_limits  # noqa: F401


def fork(mode: str, folder: Path, providers: Sequence[Provider]) -> int:
    """Run all cases in a child, which writes to the file `mode`."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        found = counted_in(mode, folder, providers)
        Path(folder, mode).write_text(json.dumps(found), encoding="utf-8")
        status = 0
    except BaseException:  # noqa: BLE001  the parent reports the failure
        traceback.print_exc()
    os._exit(status)


def counted_in(mode: str, folder: Path, providers: Sequence[Provider]) -> dict[str, Any]:
    """Run all cases in one mode."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    ledger = folder / f"{mode}.db"
    policy = folder / f"{mode}.yaml"
    policy.write_text(json.dumps({"models": priced_models(providers)}), encoding="utf-8")
    os.environ |= {"OTEL_LIMITS_POLICY": str(policy), "OTEL_LIMITS_LEDGER": str(ledger)}
    set_up_tracing(mode)

    import otel_limits

    asker = Asker()
    otel_limits.enable(otel_limits.Limits(max_turns=MAX_TURNS), observers=[asker.events.append])
    with serving() as vendor:
        found = asyncio.run(asker.ask_all(vendor, providers))
        if mode == MODES[0]:  # the modes count alike
            capped = asyncio.run(caps.ask_all(vendor, providers))
            (folder / CAPPED).write_text(json.dumps(capped), encoding="utf-8")
    otel_limits.disable()  # which flushes the ledger
    rows = {each.pop("id"): each for each in ledger_rows(ledger)}
    for of_vendor in found.values():
        for record in of_vendor.values():
            record["ledger"] = [rows.get(each) for each in record.pop("invocations")]
    return found


def set_up_tracing(mode: str) -> None:
    """Make a tracer provider, none, or a disabled one."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if mode == "disabled":
        os.environ["OTEL_SDK_DISABLED"] = "true"
    if mode != "hooks":
        trace.set_tracer_provider(TracerProvider())


def priced_models(providers: Sequence[Provider]) -> dict[str, Any]:
    """Return a price for each model that does not run locally."""
    prices = {name: float(amount) for name, amount in PRICES.items()}
    named = {name_of(each.make("http://127.0.0.1:9")) for each in providers if not each.is_local}
    return {name: {"price": prices} for name in named}


def name_of(model: Any) -> str:
    """Return the id of a model."""
    config = model.get_config()
    name: str = config["endpoint_name"] if "endpoint_name" in config else config["model_id"]
    return name


def ledger_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the ledger row of each invocation."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(
            "SELECT invocation_id AS id, count(*) AS calls, sum(input_tokens) AS input,"
            " sum(output_tokens) AS output, sum(cache_read_tokens) AS read,"
            " sum(cache_write_tokens) AS write, sum(cache_write_1h_tokens) AS write_1h,"
            " sum(price_pico) AS pico FROM otel_limits_model_calls GROUP BY invocation_id"
        )
        yield from map(dict, rows)


class Asker:
    """Runs the cases one after another, and records the counts of each."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.models: dict[str, Model] = {}
        self.told = metrics()
        """The metrics after the last case."""

    async def ask_all(self, vendor: Vendor, providers: Sequence[Provider]) -> dict[str, Any]:
        """Call vendors in each of their cases."""
        found: dict[str, Any] = {}
        for provider in providers:
            asks = {name: case(provider) for name, case in CASES.items()}
            found[provider.name] = {
                name: await self.ask(provider, ask, vendor)
                for name, ask in asks.items()
                if ask is not None
            }
        return found

    async def ask(self, provider: Provider, ask: Ask, vendor: Vendor) -> dict[str, Any]:
        """Run one case."""
        self.events.clear()
        vendor.replies[:] = ask.replies
        key = f"{provider.name} {dict(ask.config)}"
        if key not in self.models:
            self.models[key] = provider.make(vendor.url, **ask.config)
        model = self.models[key]
        said = [await self.invoke(model, ask) for _ in range(ask.times)]
        before, self.told = self.told, metrics()
        told = Counter(self.told)
        told.subtract(before)
        return {**self.noted(), "metrics": told, "said": said}

    async def invoke(self, model: Model, ask: Ask) -> dict[str, Any]:
        """Run an agent once, and return its result."""
        from otel_limits import stop_of

        turn = ({"role": "user"}, {"role": "assistant"})
        history: Any = [
            {**each, "content": [{"text": f"{number} of {ask.history}"}]}
            for number in range(ask.history)
            for each in turn
        ]
        agent = Agent(
            model=model,
            messages=history,
            tools=[caps.search] if ask.has_tool else [],
            name="wire",
            callback_handler=None,
            retry_strategy=None,
        )
        try:
            if ask.how == "output":
                await agent.structured_output_async(Report, ask.prompt)
                return {}
            asked: dict[str, Any] = (
                {"structured_output_model": Report} if ask.how == "output model" else {}
            )
            stop = stop_of(await agent.invoke_async(ask.prompt, **asked))
        except Exception as error:  # noqa: BLE001  clients fail in all ways
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        return {"usage": asdict(stop.usage) if stop is not None else None}

    def noted(self) -> dict[str, Any]:
        """Return the counts of the events published since the last call."""
        from otel_limits import ModelCall, Stop

        calls = [event for event in self.events if isinstance(event, ModelCall)]
        stops = [event for event in self.events if isinstance(event, Stop)]
        return {
            "calls": [
                {
                    "kind": call.kind,
                    "estimated": call.estimated,
                    **asdict(call.usage),
                    "price": None if call.price is None else str(call.price),
                    "source": call.price_source,
                }
                for call in calls
            ],
            "stops": [asdict(stop.usage) for stop in stops],
            "invocations": [stop.invocation_id for stop in stops],
        }


def metrics() -> Counter[str]:
    """Sum the metrics over all agents, as multiples of 10^-12."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name in COUNTED:
                kind = sample.labels.get("kind" if "cached" in sample.name else "type", "")
                found[f"{sample.name}{kind and f' {kind}'}"] += round(sample.value * PICO)
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
