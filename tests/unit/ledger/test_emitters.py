"""Model calls are known in files by the attributes of every convention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli.parser import main
from tests.paths import ROOT
from tests.price_list import listed

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

EMITTED = ROOT / "tests/emitters"


ONE = ((1_200, 30, 1_000),)
TWO = (*ONE, (1_300, 20, 1_200))
"""Input, output and cached tokens of the calls, as `tests/emitters/make.py` has them answered."""

UNTOLD = ((1_200, 30, 0),)
"""LiteLLM's own spans do not say how much was cached."""

FILES = {
    "openinference-openai": ("(no agent)", ONE),
    "openinference-anthropic": ("(no agent)", ONE),
    "openinference-langchain": ("(no agent)", TWO),
    "openinference-openai-agents": ("forecaster", TWO),
    "openllmetry-openai": ("(no agent)", ONE),
    "openllmetry-anthropic": ("(no agent)", ONE),
    "openllmetry-langchain": ("ask", TWO),
    "openllmetry-openai-agents": ("forecaster", TWO),
    "langfuse": ("(no agent)", ONE),
    "langsmith": ("(no agent)", TWO),
    "litellm": ("(no agent)", UNTOLD),
    "pydantic-ai": ("forecaster", TWO),
    "google-adk": ("forecaster", TWO),
    "strands-1.30": ("forecaster", TWO),
    "strands": ("forecaster", TWO),
}


def test_every_file_is_imported() -> None:
    """None lies there unread."""
    assert sorted(FILES) == sorted(file.stem for file in EMITTED.glob("*.jsonl"))


@pytest.mark.parametrize("library", FILES)
def test_spans_of_the_libraries_themselves_are_imported(library: str, ledger: LedgerFile) -> None:
    """Every call once, cached tokens within the input, whatever sums stand around them."""
    agent, calls = FILES[library]
    assert main(["ledger", "import", str(EMITTED / f"{library}.jsonl")]) == 0
    rows = sorted(ledger.calls(), key=lambda call: call["input_tokens"])
    found = [
        tuple(row[f"{part}_tokens"] for part in ("input", "output", "cache_read")) for row in rows
    ]
    assert found == list(calls)
    assert {(row["state"], row["agent"]) for row in rows} == {("measured", agent)}
    assert all("-4" in row["model"] or "gemini-2.5" in row["model"] for row in rows)


def test_the_same_spans_again_are_the_same_calls(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing all files, then again: the second run reports how many were already there."""
    files = [str(file) for file in EMITTED.glob("*.jsonl")]
    for _ in range(2):
        assert main(["ledger", "import", *files]) == 0
    number = sum(len(calls) for _, calls in FILES.values())
    assert f"{number} model calls were already in the ledger" in capsys.readouterr().out
    assert len(ledger.calls()) == number


@listed
def test_imported_calls_of_libraries_are_priced(ledger: LedgerFile) -> None:
    """By each library's model and vendor names; one price for one call, whichever reports it."""
    files = [str(EMITTED / f"{library}.jsonl") for library in FILES if FILES[library][1] != UNTOLD]
    assert main(["ledger", "import", *files]) == 0
    prices: dict[tuple[str, int], set[int]] = {}
    for row in ledger.calls():
        prices.setdefault((row["model"][:3], row["input_tokens"]), set()).add(row["price_pico"])
    assert {len(each) for each in prices.values()} == {1}, prices
    assert not any(None in each for each in prices.values()), prices


def spans(*marked: dict[str, Any]) -> str:
    """A line of spans with these attributes, each within the one before."""
    listed = [
        {
            "traceId": "1" * 32,
            "spanId": f"{number + 1:016x}",
            "parentSpanId": f"{number:016x}" if number else "",
            "name": "x",
            "startTimeUnixNano": "1700000000000000000",
            "endTimeUnixNano": "1700000001000000000",
            "attributes": [
                {
                    "key": key,
                    "value": {"intValue" if isinstance(each, int) else "stringValue": each},
                }
                for key, each in attributes.items()
            ],
        }
        for number, attributes in enumerate(marked)
    ]
    scope = {"scope": {"name": "any"}, "spans": listed}
    return json.dumps({"resourceSpans": [{"scopeSpans": [scope]}]}) + "\n"


USED = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5}


@pytest.mark.parametrize(
    ("marked", "calls"),
    [
        ([{"gen_ai.operation.name": "chat", **USED}], 1),
        ([{"gen_ai.operation.name": "invoke_agent", **USED}], 1),
        ([{"gen_ai.operation.name": "embeddings", **USED}], 0),
        ([{"openinference.span.kind": "CHAIN", **USED}], 0),
        ([{"traceloop.span.kind": "workflow", **USED}], 0),
        ([{"llm.request.type": "chat", **USED}], 1),
        ([{"mlflow.spanType": '"CHAT_MODEL"', **USED}], 1),
        ([{"mlflow.spanType": '"CHAIN"', **USED}], 0),
        ([{"genkit:metadata:subtype": "model", **USED}], 1),
        ([{"genkit:metadata:subtype": "flow", **USED}], 0),
        ([{"gen_ai.request.model": "m", **USED}], 1),
        ([{"openinference.span.kind": "AGENT", **USED}, {"llm.request.type": "chat", **USED}], 1),
        ([{"gen_ai.operation.name": "chat", **USED}, {"llm.request.type": "chat", **USED}], 1),
    ],
)
def test_only_model_calls_are_counted(
    marked: list[dict[str, Any]], calls: int, ledger: LedgerFile, tmp_path: Path
) -> None:
    """By what the span says it is; sums of known calls are never added. None is status 1."""
    file = tmp_path / "spans.jsonl"
    file.write_text(spans(*marked))
    assert main(["ledger", "import", str(file)]) == (0 if calls else 1)
    assert len(ledger.calls()) == calls


def test_file_without_model_calls_is_reported(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message, because the file was exported for another purpose."""
    assert not ledger.path.exists()
    file = tmp_path / "spans.jsonl"
    file.write_text(spans({"http.request.method": "GET"}))
    assert main(["ledger", "import", str(file)]) == 1
    assert capsys.readouterr().err.startswith("No model calls found in 1 span of 1 JSON document.")


@pytest.mark.parametrize("unset", [{}, {"value": None}, {"value": {}}])
def test_an_attribute_without_a_value_costs_nothing_else(
    unset: dict[str, Any], ledger: LedgerFile, tmp_path: Path
) -> None:
    """An unset count is unreported; the other spans of the line are read."""
    document = json.loads(spans({"gen_ai.operation.name": "chat", **USED}))
    (span,) = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    span["attributes"][-1] = {"key": "gen_ai.usage.output_tokens", **unset}
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps(document))
    assert main(["ledger", "import", str(file)]) == 0
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["output_tokens"], call["state"]) == (10, 0, "estimated")


def test_a_share_of_cached_tokens_is_never_above_all(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Strands 1.30 passed on Bedrock's report: cached tokens excluded from the input."""
    file = tmp_path / "spans.jsonl"
    used = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.total_tokens": 12_060,
        "gen_ai.usage.cache_read_input_tokens": 12_000,
    }
    file.write_text(spans(used))
    assert main(["ledger", "import", str(file)]) == 0
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["cache_read_tokens"]) == (12_050, 12_000)
    capsys.readouterr()
    assert main(["audit", "spend", "--ledger", str(ledger.path), "--format", "json"]) == 0
    total = json.loads(capsys.readouterr().out)["totals"]["spend"]
    assert total["cached_share"] == pytest.approx(12_000 / 12_050)


def test_a_price_for_bedrock_alone_is_that_of_an_imported_call(
    ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strands' spans name Strands where the seller should be; the id of the model says Bedrock."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "models: {'us.anthropic.*': {provider: bedrock, price: {input: 1, output: 1}}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["ledger", "import", str(EMITTED / "strands.jsonl")]) == 0
    assert {row["price_source"] for row in ledger.calls()} == {"policy"}


@listed
def test_calls_without_measured_usage_are_listed_with_the_reason(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens without a known rate are named as the provider named them."""
    chat: dict[str, Any] = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o", **USED,
    }  # fmt: skip
    calls: tuple[dict[str, Any], ...] = (
        {**chat, "gen_ai.usage.quantum_input_tokens": 4},
        {**chat, "gen_ai.usage.total_tokens": 40},
        {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o"},
        {**chat, "gen_ai.usage.cost": 7},
    )
    file = tmp_path / "spans.jsonl"
    lines = (spans(each).replace("1" * 32, f"{n:032x}") for n, each in enumerate(calls, 1))
    file.write_text("".join(lines))
    assert main(["ledger", "import", str(file)]) == 0
    capsys.readouterr()
    assert main(["audit", "unmeasured", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["unmeasured"]
    assert {(each["reason"], each["calls"], each["tokens"]) for each in rows} == {
        ("the rate of its gen_ai.usage.quantum_input_tokens is unknown", 1, 15),
        ("its total has more tokens than its parts", 1, 40),
        ("unmeasured: the provider reported no usage", 1, 0),
    }
    prices = [each["price_pico"] for each in ledger.calls() if each["input_tokens"]]
    assert sorted(each is None for each in prices) == [False, True, True]
    assert main(["ledger", "reprice"]) == 0
    assert prices == [each["price_pico"] for each in ledger.calls() if each["input_tokens"]]
