"""What every vendor bills, and what is counted of it: by real model classes and clients."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from strands import Agent

from otel_limits import Limits, ModelCall, enable
from otel_limits.core.facts import Stop
from tests.wire.formats import PARTS
from tests.wire.providers import BY_LITELLM, PROVIDERS, Bill, Provider
from tests.wire.server import Reply

if TYPE_CHECKING:
    from strands.models import Model

    from otel_limits import Fact
    from tests.conftest import Metric
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the vendors' clients

PLAIN = Bill(input=120, output=24)
CACHED = Bill(input=12_050, output=30, read=2_000)
WRITTEN = Bill(input=12_050, output=30, read=2_000, write=10_000)
THOUGHT = Bill(input=10_120, output=4_308, read=0, reasoning=2_809)

providers = pytest.mark.parametrize("provider", PROVIDERS, ids=lambda each: each.name)


def ask(provider: Provider, vendor: Vendor, facts: list[Fact], *replies: Reply) -> ModelCall:
    """Ask once, and return what was counted."""
    vendor.replies[:] = replies
    enable(Limits(max_turns=5), observers=[facts.append])
    model = made(provider, vendor.url)
    agent = Agent(model=model, name="wire", callback_handler=None, retry_strategy=None)
    try:
        agent("Tell me of the harbour.")
    except Exception:
        logging.getLogger(__name__).debug("The call failed", exc_info=True)
    (call,) = [fact for fact in facts if isinstance(fact, ModelCall)]
    (stop,) = [fact for fact in facts if isinstance(fact, Stop)]
    assert (stop.usage.input, stop.usage.output) == (call.usage.input, call.usage.output)
    return call


def made(provider: Provider, url: str) -> Model:
    """Make the model, where the vendor's client is installed."""
    try:
        return provider.make(url)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed; the extra `test` brings it")


def counted(call: ModelCall) -> Bill:
    """What was counted, in the words of a bill."""
    usage = call.usage
    return Bill(
        input=usage.input, output=usage.output, read=usage.cache_read, write=usage.cache_write
    )


def billed(bill: Bill, provider: Provider) -> Bill:
    """What can be counted of a bill, after Strands' class has read it."""
    read = bill.read if provider.has_cache and "cached" not in provider.lost else 0
    return Bill(input=bill.input, output=bill.output, read=read, write=bill.write)


@providers
def test_a_plain_call(
    provider: Provider, vendor: Vendor, facts: list[Fact], source: str, metric: Metric
) -> None:
    """Counted to the token, in facts, sums and metrics, with spans and without."""
    call = ask(provider, vendor, facts, provider.reply(PLAIN))
    assert (call.kind, call.estimated, counted(call)) == ("measured", False, PLAIN)
    labels = {"agent": "wire", "model": call.model}
    assert metric("otel_limits_tokens_total", **labels, type="input") == PLAIN.input
    assert metric("otel_limits_tokens_total", **labels, type="output") == PLAIN.output


@providers
def test_cached_tokens(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """They are a part of the input, whether the vendor counts them inside or beside it."""
    bill = WRITTEN if provider.has_cache_write else CACHED
    call = ask(provider, vendor, facts, provider.reply(bill))
    assert (call.kind, counted(call)) == ("measured", billed(bill, provider))


@providers
def test_reasoning(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """It is a part of the output, whether the vendor counts it inside or beside it."""
    call = ask(provider, vendor, facts, provider.reply(THOUGHT))
    assert (call.kind, counted(call)) == ("measured", billed(THOUGHT, provider))


@pytest.mark.parametrize(
    "provider",
    [each for each in PROVIDERS if each.is_cumulative],
    ids=lambda each: each.name,
)
def test_usage_in_several_chunks(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """It is cumulative: the last one is the bill."""
    call = ask(provider, vendor, facts, provider.reply(Bill(input=120, output=3), PLAIN))
    assert counted(call) == PLAIN


@providers
def test_missing_usage(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """A call that nobody measured is estimated, and never free."""
    if provider.name == "Anthropic":
        pytest.skip("Its format always has usage")
    call = ask(provider, vendor, facts, provider.reply())
    assert call.kind != "zero_token"
    assert call.estimated == (provider.without_usage != BY_LITELLM)
    assert call.usage.input > 0
    assert 10 < call.usage.output < 40


@providers
def test_a_refusal(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """What the vendor refuses costs nothing, whenever the class begins to stream."""
    for status in (400, 402, 403, 429, 500, 503):
        facts.clear()
        body = b'{"error": {"message": "no", "code": %d, "type": "x", "status": "NO"}}' % status
        call = ask(provider, vendor, facts, Reply([body], "application/json", status))
        assert (status, call.kind, call.usage.total) == (status, "failed", 0)


@providers
def test_an_answer_that_breaks_off(provider: Provider, vendor: Vendor, facts: list[Fact]) -> None:
    """Its input is billed, and what was streamed by then."""
    call = ask(provider, vendor, facts, provider.broken())
    assert call.estimated
    assert call.usage.input > 0
    if provider.name != "llama.cpp":  # its class hands on nothing before it has all
        assert len(PARTS[0]) / 8 < call.usage.output < len(PARTS[0]) / 2
