"""The ledger against a bill: each difference has its cause, and its parts add up to it."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from otel_limits.ledger.maintenance import prune
from otel_limits.ledger.rows import MICROSECONDS
from tests.ledger.bills import (
    BILLS,
    DAY,
    THIRD,
    BilledCall,
    by_day,
    openai,
    openai_bill,
    paid,
    used,
)
from tests.ledger.book import Call, Entry, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

Answer = dict[str, Any]

CALLS = [
    BilledCall(at=THIRD + day * DAY + 3_600 * number, input=100 + 13 * number, output=7 + number**2)
    for day in range(3)
    for number in range(1, 9)
]
"""Eight calls on each of three days, all of different sizes within a day."""

POLICY = """
models:
  m: {price: {input: 2, output: 10}}
"""


def recorded(call: BilledCall, vendor: str, **changes: Any) -> Entry:
    """A call in the ledger, with the name that the agent asked for."""
    price = str(call.price)
    at = call.at - 1  # a call of a `Book` is a second after its invocation began
    made = Call(input=call.input, output=call.output, model="m", provider=vendor, price=price)
    return Entry(calls=[replace(made, **changes)], at=at)


def book_of(vendor: str, change: str) -> list[Entry]:
    """The ledger of `CALLS`, with a change on the second day."""
    entries = [recorded(each, vendor) for each in CALLS]
    guess: Mapping[str, Any] = {"kind": "unmeasured", "estimated": True}
    if change == "lost":
        del entries[8:11]
    elif change == "additional":
        entries.append(recorded(replace(CALLS[9], input=5, output=3), vendor))
    elif change == "unpriced":
        entries[8:13] = [recorded(each, vendor, price=None) for each in CALLS[8:13]]
    elif change == "estimated":
        entries[8:10] = [
            recorded(each, vendor, input=90, output=9, price="0.00027", **guess)
            for each in CALLS[8:10]
        ]
    elif change == "unmeasured":
        nothing: Mapping[str, Any] = {"input": 0, "output": 0, "price": None}
        entries[8] = recorded(CALLS[8], vendor, kind="unmeasured", **nothing)
    elif change == "another day":
        entries[8] = recorded(replace(CALLS[8], at=CALLS[0].at), vendor)
    elif change == "other prices":
        entries[8] = recorded(CALLS[8], vendor, price="0.1")
    elif change == "all":
        del entries[0:3]
        entries[8 - 3 : 13 - 3] = [recorded(each, vendor, price=None) for each in CALLS[8:13]]
        entries[16 - 3 : 18 - 3] = [
            recorded(each, vendor, input=90, output=9, price="0.00027", **guess)
            for each in CALLS[16:18]
        ]
    return entries


def sums(calls: Sequence[BilledCall]) -> tuple[int, Decimal]:
    """Tokens and price of calls."""
    price = sum((each.price for each in calls), Decimal(0))
    return sum(each.input + each.output for each in calls), price


LOST, UNPRICED, GUESSED = sums(CALLS[8:11]), sums(CALLS[8:13]), sums(CALLS[8:10])
FIRST_LOST, LAST_GUESSED = sums(CALLS[:3]), sums(CALLS[16:18])
# Tokens and USD that the bill has more, by cause.
EXPECTED: Mapping[str, Mapping[str, tuple[int, Decimal]]] = {
    "nothing": {},
    "lost": {"only on the bill": LOST},
    "additional": {"only in the ledger": (-8, Decimal("-0.00004"))},
    "unpriced": {"unpriced": (0, UNPRICED[1])},
    "estimated": {"estimated": (GUESSED[0] - 198, GUESSED[1] - Decimal("0.00054"))},
    "unmeasured": {"unmeasured": sums(CALLS[8:9])},
    "another day": {"on another day": (0, Decimal(0))},
    "other prices": {"unexplained": (0, CALLS[8].price - Decimal("0.1"))},
    "all": {
        "only on the bill": FIRST_LOST,
        "unpriced": (0, UNPRICED[1]),
        "estimated": (LAST_GUESSED[0] - 198, LAST_GUESSED[1] - Decimal("0.00054")),
    },
}


# No report of Anthropic counts requests, so estimates and lost calls look the same.
ALTERNATIVES = {
    "estimated": "estimated or only on the bill",
    "unmeasured": "unmeasured or only on the bill",
}


def reconcile(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, Answer]:
    """The exit status and the answer."""
    status = main(["audit", "reconcile", *map(str, words), "--format", "json"])
    out, err = capsys.readouterr()
    assert out, err
    return status, json.loads(out)


def causes(answer: Answer) -> dict[str, tuple[int, Decimal]]:
    """Tokens and cost by cause, without rounding."""
    found: dict[str, tuple[int, Decimal]] = defaultdict(lambda: (0, Decimal(0)))
    for part in answer.get("bill_parts", ()):
        tokens, cost = found[part["cause"]]
        found[part["cause"]] = tokens + part["tokens"], cost + Decimal(part["cost"])
    found.pop("rounding", None)
    return {cause: (tokens, round(cost, 9)) for cause, (tokens, cost) in found.items()}


def require_sums(answer: Answer) -> None:
    """Fail unless the parts add up to the differences, exactly."""
    parts = answer.get("bill_parts", [])
    costs = [Decimal(each["difference"]) for each in answer.get("bill_cost", ())]
    assert sum(Decimal(each["cost"]) for each in parts) == sum(costs)
    counted = ("input tokens", "output tokens")
    rows = [each for each in answer.get("bill_tokens", ()) if each["measure"] in counted]
    assert sum(each["tokens"] for each in parts) == sum(each["difference"] for each in rows)


def files_of(folder: Path, form: str, calls: Sequence[BilledCall] = CALLS) -> list[Path]:
    """The bill of some calls."""
    files = []
    for number, text in enumerate(BILLS[form](calls)):
        files.append(folder / f"{form}-{number}")
        files[-1].write_text(text, encoding="utf-8")
    return files


@pytest.fixture(autouse=True)
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of the models."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))


@pytest.mark.parametrize("form", BILLS)
def test_each_difference_has_its_cause(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every form of bill, the tokens and the cost of each cause are exact."""
    files = files_of(tmp_path, form)
    for change, expected in EXPECTED.items():
        ledger = tmp_path / f"{change}.db"
        entries = book_of(form.split(maxsplit=1)[0], change)
        write(parse("test", str(ledger), tmp_path / "data"), *entries)
        words = ("--ledger", ledger, "--tolerance", 0, "--bill", *files)
        status, answer = reconcile(*words, capsys=capsys)
        found = causes(answer)
        named = ALTERNATIVES if form == "anthropic" else {}
        assert (change, found) == (
            change,
            {named.get(cause, cause): each for cause, each in expected.items()},
        )
        assert (change, status) == (change, int(bool(expected)))
        require_sums(answer)


def saved(folder: Path, *texts: str) -> list[Path]:
    """Files with these texts."""
    files = [folder / f"export-{number}" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def test_calls_imported_from_the_log_confirm_nothing(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that was imported would always agree with itself."""
    write(ledger.address, *book_of("litellm", "nothing"))
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        statement = "UPDATE otel_limits_model_calls SET source = 'import', agent = 'litellm'"
        connection.execute(f"{statement} WHERE id IN (9, 10)")
    bill = files_of(tmp_path, "litellm")
    status, answer = reconcile("--ledger", ledger.address, "--bill", *bill, capsys=capsys)
    assert causes(answer) == {"imported": GUESSED}
    assert status == 1
    assert "2 calls in the ledger came from this log by ledger import" in answer["summary"]
    require_sums(answer)


def test_call_over_midnight_after_the_bill_is_on_another_day(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A month's log has its start, and the ledger has its end in the next month."""
    call = BilledCall(at=THIRD + DAY - 1, input=50, output=5)
    write(ledger.address, recorded(replace(call, at=call.at + 2), "litellm"))
    bill = files_of(tmp_path, "litellm", [call])
    status, answer = reconcile("--ledger", ledger.address, "--bill", *bill, capsys=capsys)
    assert (status, causes(answer)) == (1, {"on another day": (55, call.price)})
    require_sums(answer)


def test_calls_of_a_gateway_are_on_its_bill_only(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenAI's client calls it, and the ledger has no address: the model is only on its bill."""
    passed_on, own = CALLS[:4], [replace(each, model="own") for each in CALLS[4:8]]
    entries = [recorded(each, "openai") for each in passed_on]
    entries += [recorded(each, "openai", model="own") for each in own]
    write(ledger.address, *entries)
    files = saved(tmp_path, *openai_bill(own), *BILLS["litellm"](passed_on))
    status, answer = reconcile("--bill", *files, capsys=capsys)
    assert (status, causes(answer)) == (0, {})
    # Without the gateway's bill, nothing shows who billed them.
    status, answer = reconcile("--bill", *files[:-1], capsys=capsys)
    tokens, price = sums(passed_on)
    assert causes(answer) == {"only in the ledger": (-tokens, -price)}


def test_page_shows_both_sides_and_causes(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report for people who do not use a terminal."""
    write(ledger.address, *book_of("openai", "all")[:-1], recorded(CALLS[-1], "openai", price="1"))
    files = map(str, files_of(tmp_path, "openai"))
    assert main(["audit", "reconcile", "--bill", *files, "--format", "html"]) == 1
    page = capsys.readouterr().out
    for part in ("chart-bill", "chart-causes", "table-bill_cost", "table-bill_parts"):
        assert f'id="{part}"' in page
    for text in ("OpenAI: unpriced", "OpenAI: only on the bill", "unexplained"):
        assert text in page


def test_usage_without_amounts_compares_tokens(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an export is still evidence, and the answer names the other half."""
    write(ledger.address, *book_of("openai", "lost"), recorded(CALLS[0], "anthropic"))
    usage = saved(tmp_path, *openai_bill(CALLS)[::2])
    words = ("--ledger", ledger.address, "--bill", *usage)
    status, answer = reconcile(*words, capsys=capsys)
    assert (status, "bill_cost" in answer) == (1, False)
    assert causes(answer) == {"only on the bill": (LOST[0], 0)}
    assert answer["summary"].endswith("only tokens are compared: pass the cost report, too.")
    status, answer = reconcile(*words, "--until", "2026-11-04T12:00", capsys=capsys)
    assert {row["day"] for row in answer["bill_tokens"]} == {"2026-11-03"}
    assert (status, causes(answer)) == (0, {})
    assert main(["audit", "reconcile", *map(str, words), "--since", "2026-12-01"]) == 2
    assert "no whole day between --since and --until" in capsys.readouterr().err
    empty = saved(tmp_path, '{"object": "page", "data": [], "has_more": false}')
    assert main(["audit", "reconcile", "--bill", *map(str, empty)]) == 2
    assert "The bills have no days." in capsys.readouterr().err


def test_bill_outside_the_window_is_named(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the file of a wrong month would look like one that agrees."""
    write(ledger.address, *book_of("openai", "all"))
    other = tmp_path / "activity.csv"
    other.write_text("date,model,usage,prompt_tokens,completion_tokens\n2026-10-31,m,1,1,1\n")
    words = ("--bill", *files_of(tmp_path, "openai"), other, "--since", "2026-11-01")
    _, answer = reconcile(*words, capsys=capsys)
    assert {row["vendor"] for row in answer["bill_cost"]} == {"OpenAI"}
    assert "OpenRouter: not compared, as its bill has no whole day" in answer["summary"]


def by_hour(day: int, hours: Iterable[int]) -> list[str]:
    """Some hours of a day, each as a page without use."""
    pages = []
    for hour in hours:
        page = json.loads(openai(day=day))
        (bucket,) = page["data"]
        bucket["start_time"] += 3_600 * hour
        bucket["end_time"] = bucket["start_time"] + 3_600
        pages.append(json.dumps(page))
    return pages


def test_bill_that_lacks_a_day_is_rejected(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise both sums lack the day, and agree."""
    write(ledger.address, *book_of("openai", "nothing"))
    usage, costs = openai_bill(CALLS)[::2], openai_bill(CALLS)[1::2]
    first, _, last = usage
    cases = [
        (
            [first, last],
            "of 2026-11-03 to 2026-11-05 lacks all or part of the usage.completions of 2026-11-04.",
        ),
        ([*usage, costs[0], costs[2]], "lacks all or part of the costs of 2026-11-04."),
        ([*usage, *costs[:1]], "lacks all or part of the costs of 2026-11-04, 2026-11-05."),
        (
            [first, *by_hour(1, {*range(24)} - {12}), last],
            "lacks all or part of the usage.completions of 2026-11-04.",
        ),
        ([*usage, *costs, openai(used(model="m"), day=6)], "2026-11-08 and 1 other day. Export"),
    ]
    for texts, sentence in cases:
        words = ("--ledger", ledger.address, "--bill", *saved(tmp_path, *texts))
        assert main(["audit", "reconcile", *map(str, words)]) == 2
        assert sentence in capsys.readouterr().err
        status, _ = reconcile(*words, "--until", "2026-11-04", capsys=capsys)
        assert status == 0
    empty = saved(tmp_path, openai(), openai(day=2))
    assert main(["audit", "reconcile", "--bill", *map(str, empty)]) == 2
    assert "lacks all or part of the report of 2026-11-04." in capsys.readouterr().err
    pages = [first, openai(day=1), last]
    status, answer = reconcile("--bill", *saved(tmp_path, *pages), capsys=capsys)
    assert (status, causes(answer)["only in the ledger"][0]) == (1, -sums(CALLS[8:16])[0])


def test_bill_that_begins_or_ends_within_a_day_is_rejected(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours are exported from any hour on; the ledger has the other hours of the day, too."""
    write(ledger.address, *book_of("openai", "nothing"))
    first, second, third = openai_bill(CALLS)[::2]
    from_noon, until_nine = by_hour(0, range(12, 24)), by_hour(2, range(9))
    cases = [
        ([*from_noon, second, third], "2026-11-03", ("--since", "2026-11-04")),
        ([first, second, *until_nine], "2026-11-05", ("--until", "2026-11-05")),
        ([*from_noon, second, *until_nine], "2026-11-03, 2026-11-05", ("--since", "2026-11-04")),
    ]
    for texts, days, window in cases:
        words = ("--ledger", ledger.address, "--bill", *saved(tmp_path, *texts))
        for options in ((), ("--since", "2026-11-03")):
            assert main(["audit", "reconcile", *map(str, words), *options]) == 2
            sentence = f"lacks all or part of the usage.completions of {days}. Export each of"
            assert sentence in capsys.readouterr().err
        status, answer = reconcile(*words, *window, "--until", "2026-11-05", capsys=capsys)
        assert (status, causes(answer)) == (0, {})


def test_hours_within_a_day_that_the_bill_has_leave_no_hole(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """E.g. an hour without use, exported next to whole days."""
    write(ledger.address, *book_of("openai", "nothing"))
    bill = saved(tmp_path, *openai_bill(CALLS), *by_hour(0, [12]), *by_hour(2, range(24)))
    status, answer = reconcile("--ledger", ledger.address, "--bill", *bill, capsys=capsys)
    assert (status, causes(answer)) == (0, {})
    assert {row["day"][-2:] for row in answer["bill_cost"]} == {"03", "04", "05"}


def test_days_with_pruned_rows_are_not_compared(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the bill would seem to have calls of another program."""
    write(ledger.address, *book_of("openai", "nothing"))
    words = ("--bill", *files_of(tmp_path, "openai"))
    with closing(Database(ledger.address)) as database:  # up to 03:00 of the second day
        list(prune(database, (THIRD + DAY + 3 * 3_600) * MICROSECONDS))
    status, answer = reconcile(*words, capsys=capsys)
    assert (status, causes(answer)) == (1, {})
    assert {row["day"] for row in answer["bill_cost"]} == {"2026-11-05"}
    assert "OpenAI: 2026-11-03 to 2026-11-04 not compared, as the ledger" in answer["summary"]
    assert answer["complete"].startswith("Incomplete: rows before 2026-11-04 03:00:00 UTC")
    status, answer = reconcile(*words, "--since", "2026-11-05", capsys=capsys)
    assert (status, "pruned_before" in answer) == (0, False)
    assert main(["audit", "reconcile", *map(str, words), "--until", "2026-11-05"]) == 2
    assert "No day of the bills can be compared: the ledger" in capsys.readouterr().err


def test_one_amount_for_a_day_is_compared_as_a_whole(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs that are not grouped by line item have no model, and the parts are still exact."""
    write(ledger.address, *book_of("openai", "lost"))
    total = sums(CALLS[8:16])[1]
    day = by_day(CALLS)[1]
    tokens = {
        "input_tokens": sum(each.input for each in day),
        "output_tokens": sum(each.output for each in day),
    }
    pages = (
        openai(used(model="m", num_model_requests=8, **tokens), day=1),
        openai(paid(str(total), project_id="first"), paid("0.01", project_id="second"), day=1),
    )
    bill = saved(tmp_path, *pages)
    status, answer = reconcile("--ledger", ledger.address, "--bill", *bill, capsys=capsys)
    (row,) = answer["bill_cost"]
    assert (row["model"], Decimal(row["billed"])) == ("(all models)", total + Decimal("0.01"))
    assert status == 1
    require_sums(answer)
    found = causes(answer)
    # The rates are those of the bill, which has an additional amount.
    assert found["only on the bill"][0] == LOST[0]
    assert found.keys() == {"only on the bill", "unexplained"}
    owners = [(each["owner"], Decimal(each["cost"])) for each in answer["bill_owners"]]
    assert owners == [("project_id=second", Decimal("0.01")), ("project_id=first", total)]


def test_days_are_those_of_the_bill(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A day that begins at 05:00 UTC has the calls of that day, not of one in UTC."""
    early = BilledCall(at=THIRD + 4 * 3_600, input=50, output=5)
    late = BilledCall(at=THIRD + DAY + 4 * 3_600, input=10, output=2)
    write(ledger.address, recorded(early, "openai"), recorded(late, "openai"))
    page = openai(used(model="m")).replace(str(THIRD), str(THIRD + 5 * 3_600))
    bill = saved(tmp_path, page.replace(str(THIRD + DAY), str(THIRD + DAY + 5 * 3_600)))
    status, answer = reconcile("--ledger", ledger.address, "--bill", *bill, capsys=capsys)
    assert (status, answer["about"].count("days of UTC-05:00")) == (0, 1)
    assert {row["difference"] for row in answer["bill_tokens"]} == {0}


def test_unknown_prices_of_calls_that_the_bill_lacks_are_no_zeros(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do the sums agree without a word about them."""
    other = replace(recorded(CALLS[9], "openai", price=None, model="n"), reason="end_turn")
    write(ledger.address, *book_of("openai", ""), other)
    bill = saved(tmp_path, *openai_bill(CALLS))
    words = ("--ledger", ledger.address, "--bill", *bill)
    status, answer = reconcile(*words, capsys=capsys)
    parts = [(each["model"], each["cause"], each["cost"]) for each in answer["bill_parts"]]
    assert (status, parts) == (1, [("n", "only in the ledger", None)])
    assert " in the ledger, without 1 call of unknown price. Difference " in answer["summary"]


def test_rounded_amounts_are_no_difference(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendor that bills whole cents agrees with a ledger that has picodollars."""
    write(ledger.address, recorded(BilledCall(at=THIRD, input=10, output=2), "openai"))
    pages = (openai(used(model="m")), openai(paid("0.0", line_item="m, input")))
    bill = saved(tmp_path, *pages)
    words = ("--ledger", ledger.address, "--tolerance", "0", "--bill", *bill)
    status, answer = reconcile(*words, capsys=capsys)
    parts = [(each["cause"], each["cost"]) for each in answer["bill_parts"]]
    assert (status, parts) == (0, [("rounding", "-0.000040000000")])


def test_the_ledger_is_compared_with_one_source(
    tmp_path: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a source, or with two, nothing is compared, and the status is 2."""
    write(ledger.address, Entry())
    bill, header = map(str, saved(tmp_path, openai(), "Bearer token"))
    where = ["audit", "reconcile", "--ledger", str(ledger.address)]
    for more, sentence in (
        ([], "Pass either --prometheus URL or --bill FILE"),
        (["--bill", bill, "--prometheus", "http://p.test"], "Pass either --prometheus URL or"),
        (["--bill", bill, "--authorization-file", header], "is for Prometheus. Leave it out"),
        (["--job", "agents", "--bill", bill], "--job is for Prometheus. Leave it out"),
        (["--bill", str(tmp_path / "missing")], "cannot be read: No such file or directory"),
    ):
        assert main([*where, *more]) == 2
        assert sentence in capsys.readouterr().err
