"""Keys of quotas: which count a call belongs to, and how it is displayed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.quotas.keys import INVALID, MISSING, Key, Template, fits, key_text


def key(template: str, **values: Any) -> Key:
    """The key of a call with these values; `__` becomes a dot."""
    found = {name.replace("__", "."): value for name, value in values.items()}
    return Template(template).key("quota", found.get)


def test_a_quota_without_a_key_counts_everybody_together() -> None:
    """There is one count, displayed as such."""
    assert key("", agent="a") == key("", agent="b")
    assert key("").shown == "(all)"


def test_each_value_has_a_count_of_its_own() -> None:
    """Two agents, two keys."""
    assert key("agent", agent="a") != key("agent", agent="b")
    assert key("agent", agent="a") == key("{agent}", agent="a")


def test_the_same_value_in_two_quotas_is_two_keys() -> None:
    """The quota's name is part of the hash."""
    template, lookup = Template("agent"), {"agent": "a"}.get
    assert template.key("x", lookup).id != template.key("y", lookup).id


def test_a_template_keeps_its_values_apart() -> None:
    """Values that contain the separator do not collide."""
    one = key("{agent}/{model}", agent="a/b", model="c")
    other = key("{agent}/{model}", agent="a", model="b/c")
    assert one.shown == other.shown
    assert one.id != other.id


def test_baggage_and_attributes_are_shown_as_hashes() -> None:
    """Agents and models are our own names; baggage and attributes may be personal data."""
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
def test_missing_value_does_not_bypass_a_quota(value: object) -> None:
    """Calls without a value share one count."""
    assert key_text(value) == MISSING
    assert key("baggage.tenant.id", baggage__tenant__id=value).shown == MISSING


@pytest.mark.parametrize("value", ["a" * 129, "a\nb", "a\0b", "\x1b[31m", "\ud800", 2.5, ["a"]])
def test_a_value_that_is_no_short_text_is_not_used(value: object) -> None:
    """All of them share one count, so inventing values gains nothing."""
    assert key_text(value) == INVALID


ANY_TEXT = st.lists(st.integers(0, sys.maxunicode)).map(lambda codes: "".join(map(chr, codes)))
"""Including lone surrogates."""


@given(ANY_TEXT)
def test_any_text_makes_a_key(text: str) -> None:
    """For any input, hash and displayed text are plain ASCII."""
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
    """The message lists the valid forms."""
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
    """It is the key of the call."""
    made = Template(template)
    assert made.key_of_text("q", text) == made.key("q", values.get)


def test_a_key_that_does_not_fit_the_template_is_refused() -> None:
    """The message names both."""
    with pytest.raises(ValueError, match=r"look like '\{agent\}/\{model\}', got 'x'"):
        Template("{agent}/{model}").key_of_text("q", "x")
    with pytest.raises(ValueError, match=r"has no keys: write '\(all\)'"):
        Template("").key_of_text("q", "x")
    assert Template("").key_of_text("q", "(all)") == Template("").key("q", dict[str, str]().get)


def test_conditions_are_globs_that_must_all_fit() -> None:
    """A missing value matches only a glob that matches everything."""
    values = {"agent": "nightly-report", "model": "m"}
    assert fits((("agent", "nightly-*"), ("model", "m")), values.get)
    assert not fits((("agent", "nightly-*"), ("model", "x*")), values.get)
    assert not fits((("baggage.tenant.id", "acme"),), values.get)
    assert fits((), values.get)


@pytest.mark.parametrize("name", ["a\xa0b", "a\u3000b", "a\U0001f469\u200d\U0001f680b", "a\t\nb"])
def test_conditions_compare_values_that_no_key_contains(name: str) -> None:
    """Otherwise a quota would not apply to some agents whose name matches."""
    for value in (name, name + "a" * 200 + "b"):
        assert fits((("agent", "a*b"), ("agent", value)), {"agent": value}.get)
        assert not fits((("agent", "b*"),), {"agent": value}.get)
        assert not fits((("agent", INVALID),), {"agent": value}.get)


def test_a_typed_text_is_each_key_that_is_written_like_it() -> None:
    """Values may contain the separator, such as the name of a model."""
    made = Template("{agent}/{model}: {baggage.user}")
    for agent, model, user in (
        ("team", "a/gpt", "joe: jr"),
        ("team/a", "gpt", "joe: jr"),
        ("team", "a/gpt: joe", "jr"),
        ("team/a", "gpt: joe", "jr"),
    ):
        values = {"agent": agent, "model": model, "baggage.user": user}
        assert made.key("q", values.get) in made.keys_of_text("q", "team/a/gpt: joe: jr")
    assert len(made.keys_of_text("q", "team/a/gpt: joe: jr")) == 4
    with pytest.raises(ValueError, match="can be several keys of quota 'q'"):
        made.key_of_text("q", "team/a/gpt: joe: jr")
    with pytest.raises(ValueError, match="can be more than 16 keys"):
        made.keys_of_text("q", "/" * 99 + ": joe")


def test_a_typed_text_that_is_unusable_as_a_key_is_refused() -> None:
    """An amount or a block for it would have no effect."""
    for text, reason in (
        ("x" * 200, "a value has 200 characters, more than 128. Calls with such a value count as"),
        ("a\nb", r"a value contains the character '\\n', which is not printable"),
        ("#0123456789ab", "#0123456789ab is a hash, so write the value itself."),
    ):
        with pytest.raises(ValueError, match=f"Quota 'q' has no key .*: {reason}"):
            Template("baggage.user").keys_of_text("q", text)
    # The placeholders are keys of calls.
    for text, value in ((INVALID, "a\nb"), (MISSING, None)):
        made = Template("agent")
        assert made.key_of_text("q", text) == made.key("q", {"agent": value}.get)
