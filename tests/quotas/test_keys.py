"""Whose share of a quota a call counts against, and what can be seen of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.quotas.keys import INVALID, MISSING, Key, Template, fits, key_text


def key(template: str, **values: Any) -> Key:
    """The key that a call with these values has; `__` stands for a dot."""
    found = {name.replace("__", "."): value for name, value in values.items()}
    return Template(template).key("quota", found.get)


def test_a_quota_without_a_key_counts_everybody_together() -> None:
    """There is one count, shown as such."""
    assert key("", agent="a") == key("", agent="b")
    assert key("").shown == "(all)"


def test_each_value_has_a_count_of_its_own() -> None:
    """Two agents, two keys."""
    assert key("agent", agent="a") != key("agent", agent="b")
    assert key("agent", agent="a") == key("{agent}", agent="a")


def test_the_same_value_in_two_quotas_is_two_keys() -> None:
    """The name of the quota is a part of the hash."""
    template, lookup = Template("agent"), {"agent": "a"}.get
    assert template.key("x", lookup).id != template.key("y", lookup).id


def test_a_template_keeps_its_values_apart() -> None:
    """Values that contain the separator do not run into each other."""
    one = key("{agent}/{model}", agent="a/b", model="c")
    other = key("{agent}/{model}", agent="a", model="b/c")
    assert one.shown == other.shown
    assert one.id != other.id


def test_what_comes_from_outside_is_seen_as_a_hash() -> None:
    """Agents and models are ours; baggage and attributes may be somebody's name."""
    shown = key(
        "{agent} {model} {baggage.tenant.id} {attribute.user.id}",
        agent="writer",
        model="m",
        baggage__tenant__id="acme",
        attribute__user__id="joe",
    ).shown
    assert shown.startswith("writer m #")
    assert "acme" not in shown
    assert "joe" not in shown


@pytest.mark.parametrize("value", [None, ""])
def test_leaving_a_value_out_does_not_lead_around_a_quota(value: object) -> None:
    """Whoever has none shares the count of those who have none."""
    assert key_text(value) == MISSING
    assert key("baggage.tenant.id", baggage__tenant__id=value).shown == MISSING


@pytest.mark.parametrize("value", ["a" * 129, "a\nb", "a\0b", "\x1b[31m", "\ud800", 2.5, ["a"]])
def test_a_value_that_is_no_short_text_is_not_used(value: object) -> None:
    """All of them share one count, so that making them up gains nothing."""
    assert key_text(value) == INVALID


ANY_TEXT = st.lists(st.integers(0, sys.maxunicode)).map(lambda codes: "".join(map(chr, codes)))
"""Lone surrogates, too."""


@given(ANY_TEXT)
def test_any_text_makes_a_key(text: str) -> None:
    """Whatever comes in, hash and shown text are plain ASCII."""
    made = key("baggage.user", baggage__user=text)
    assert made.id.isascii()
    assert made.shown.isascii()
    assert len(made.id) == 32


@pytest.mark.parametrize(
    "template",
    [
        "tenant",
        "{tenant}",
        "baggage",
        "baggage.",
        "{agent}{model}",
        "{agent",
        "agent}",
        "literal/{}",
        "header.x",
        "baggage.a b",
    ],
)
def test_a_template_that_cannot_be_read_is_refused(template: str) -> None:
    """The sentence says what can be written."""
    with pytest.raises(ValueError, match="key must"):
        Template(template)


@pytest.mark.parametrize(
    ("template", "text", "values"),
    [
        ("agent", "a/b", {"agent": "a/b"}),
        ("{agent}/{baggage.tenant}", "writer/acme", {"agent": "writer", "baggage.tenant": "acme"}),
        ("team:{agent}", "team:x", {"agent": "x"}),
    ],
)
def test_a_person_writes_a_key_as_the_template_has_it(
    template: str, text: str, values: dict[str, str]
) -> None:
    """It is the key that the call has."""
    made = Template(template)
    assert made.key_of_text("q", text) == made.key("q", values.get)


def test_a_key_that_does_not_fit_the_template_is_refused() -> None:
    """Both are named."""
    with pytest.raises(ValueError, match=r"look like '\{agent\}/\{model\}', got 'x'"):
        Template("{agent}/{model}").key_of_text("q", "x")
    with pytest.raises(ValueError, match=r"has no keys: write '\(all\)'"):
        Template("").key_of_text("q", "x")
    assert Template("").key_of_text("q", "(all)") == Template("").key("q", dict[str, str]().get)


def test_conditions_are_globs_that_must_all_fit() -> None:
    """A value that is missing fits only a glob that fits everything."""
    values = {"agent": "nightly-report", "model": "m"}
    assert fits((("agent", "nightly-*"), ("model", "m")), values.get)
    assert not fits((("agent", "nightly-*"), ("model", "x*")), values.get)
    assert not fits((("baggage.tenant.id", "acme"),), values.get)
    assert fits((), values.get)
