"""Changes of the policy file that loosen limits are logged and published."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from otel_limits import PolicyRead, enable
from otel_limits.core import policy
from otel_limits.core.comparisons import NOT_COMPARABLE
from otel_limits.core.policy import Policy
from otel_limits.quotas import quota
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.policy.loosening import loosened
from otel_limits.settings.policy.reader import parse

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from otel_limits import Event

LOOSER_VERSIONS = [
    # before, after, and a phrase for each change; one that ends with ? may loosen a limit
    (
        "quotas: {q: {model_calls: 40, window: day}}",
        "quotas: {q: {model_calls: 400, window: day}}",
        ["quota 'q': amount 40 model calls per day -> 400 model calls per day"],
    ),
    (
        "quotas: {q: {model_calls: 40, window: day}}",
        "{}",
        ["quota 'q': 40 model calls per day -> no quota"],
    ),
    (
        "quotas: {q: {model_calls: 40, window: day}}",
        "quotas: {q: {model_calls: 40, window: day, action: observe}}",
        ["quota 'q': action unset -> observe"],
    ),
    (
        "quotas: {q: {model_calls: 40, window: day, action: halt}}",
        "{defaults: {action: observe}, quotas: {q: {model_calls: 40, window: day}}}",
        ["all agents: action halt -> observe", "quota 'q': action halt -> unset"],
    ),
    (
        "quotas: {q: {model_calls: 40, window: day}}",
        "quotas: {q: {model_calls: 40, window: hour}}",
        ["quota 'q': amount 40 model calls per day -> 40 model calls per hour"],
    ),
    (
        "quotas: {q: {model_calls: 700, window: week}}",
        "quotas: {q: {tokens: 99, window: week}}",
        ["quota 'q': amount 700 model calls per week -> 99 tokens per week?"],
    ),
    (
        "quotas: {q: {model_calls: 100, window: day}}",
        "quotas: {q: {model_calls: 700, window: week}}",
        ["quota 'q': amount 100 model calls per day -> 700 model calls per week?"],
    ),
    # stricter, also a year that is shorter than twelve of its longest month
    (
        "quotas: {q: {model_calls: 700, window: week}}",
        "quotas: {q: {model_calls: 100, window: day}}",
        [],
    ),
    (
        "quotas: {q: {model_calls: 12, window: year}}",
        "quotas: {q: {model_calls: 1, window: month}}",
        [],
    ),
    (
        "quotas: {q: {concurrency: 2}}",
        "quotas: {q: {concurrency: 3}}",
        ["quota 'q': amount 2 concurrent model calls -> 3 concurrent model calls"],
    ),
    (
        "quotas: {q: {tokens: {a: 9, default: 1}, plan: attribute.p, window: day}}",
        "quotas: {q: {tokens: {b: 9, default: 1}, plan: attribute.p, window: day}}",
        ["quota 'q': amount of plan 'b' 1 token per day -> 9 tokens per day"],
    ),
    (
        "quotas: {q: {tokens: 5, window: day, key: agent, keys: {a: 1, b: 2}}}",
        "quotas: {q: {tokens: 5, window: day, key: model, keys: {b: 7}}}",
        [
            "quota 'q': amount of a key 2 tokens per day -> 7 tokens per day",
            "quota 'q': amount of a key 1 token per day -> 5 tokens per day",
            "quota 'q': key agent -> model?",
        ],
    ),
    (
        "quotas: {q: {concurrency: 2}}",
        "quotas: {q: {concurrency: 2, key: agent}}",
        ["quota 'q': key unset -> agent"],
    ),
    (
        "quotas: {q: {concurrency: 2, where: {agent: a}}}",
        "quotas: {q: {concurrency: 2, where: {agent: b}}}",
        ["quota 'q': where agent=a -> agent=b?"],
    ),
    (
        "quotas: {q: {concurrency: 2}}",
        "quotas: {q: {concurrency: 2, where: {agent: a}, on_store_error: local}}",
        ["quota 'q': where unset -> agent=a", "quota 'q': on_store_error deny -> local"],
    ),
    (
        "quotas: {q: {tokens: 5, window: PT1M, on_lost: charge}}",
        "quotas: {q: {tokens: 5, window: PT1M, pace: smooth, grace: 5m, on_exceeded: wait}}",
        [
            "quota 'q': pace window -> smooth?",
            "quota 'q': on_lost charge -> free",
            "quota 'q': on_exceeded refuse -> wait",
            "quota 'q': grace 30s -> 5m",
        ],
    ),
    (
        "quotas: {q: {tokens: 50, window: PT1M, pace: smooth}}",
        "quotas: {q: {tokens: 50, window: PT1M, pace: smooth, burst: 6}}",
        ["quota 'q': burst 5 -> 6"],
    ),
    (
        "tools: {'ssh*': {exempt: false}}",
        "tools: {'ssh*': {exempt: true}, ls: {action: refuse}}",
        ['tools["ssh*"].exempt false -> true'],
    ),
    (
        "defaults: {tool_action: halt, unmeasured: halt}",
        "tools: {ls: {failures: marked}}",
        [
            "all agents: tool_action halt -> refuse",
            "all agents: unmeasured halt -> estimate",
            'tools["ls"].failures unset -> marked?',
        ],
    ),
    (
        "{agents: {a: {on_resume: continue}}}",
        "{agents: {a: {on_resume: fresh}}}",
        ["agent 'a': on_resume continue -> fresh"],
    ),
    (
        "{defaults: {limits: {max_cost_usd: 1}}, models: {m: {price: {input: 3, output: 9}}}}",
        (
            "{defaults: {limits: {max_cost_usd: 1}}, models: {m: {price: {input: 4, output: 1}},"
            " n: {local: true}}}"
        ),
        [
            'models["m"] price {input: 3, output: 9} -> price {input: 4, output: 1}',
            'models["n"] unset -> local true?',
        ],
    ),
    (
        "models: {m: {price: {input: 3, output: 9}}}",
        "models: {m: {price: {input: 1, output: 9}}}",
        [],
    ),
    (
        "{defaults: {limits: {max_turns: 3}}, agents: {a: {limits: {max_turns: 2}}}}",
        "{defaults: {limits: {max_turns: 4}}, agents: {a: {limits: {max_turns: 2}}}}",
        ["all other agents: max_turns 3 -> 4"],
    ),
    # the same limit, written or divided in another way, or without effect
    (
        "quotas: {q: {tokens: 5, window: day, key: baggage.t, on_exceeded: wait, max_wait: 10s}}",
        "quotas: {q: {tokens: 5, window: day, key: '{baggage.t}', where: {agent: '*'}}}",
        [],
    ),
    (
        "quotas: {q: {tokens: 5, window: day, on_store_error: allow, grace: 10s}}",
        "quotas: {q: {tokens: 5, window: day, grace: 20s}}",
        [],
    ),
    (
        "quotas: {q: {tokens: 5, window: day, key: agent, where: {agent: a}}}",
        "quotas: {q: {tokens: 5, window: day, on_exceeded: refuse}}",
        [],
    ),
    (
        "{defaults: {action: observe}, quotas: {q: {concurrency: 2}}}",
        "{defaults: {action: observe}, quotas: {q: {concurrency: 2, action: observe}}}",
        [],
    ),
    ("tools: {ls: {exempt: true}}", "tools: {ls: {exempt: false}}", []),
    (
        "quotas: {q: {tokens: 5, window: day, on_store_error: local, on_exceeded: wait}}",
        (
            "quotas: {q: {tokens: 5, window: day, on_store_error: allow, on_exceeded: wait,"
            " max_wait: 1m, reserve: expected}}"
        ),
        [
            "quota 'q': reserve worst_case -> expected",
            "quota 'q': on_store_error local -> allow",
            "quota 'q': max_wait 30s -> 1m",
        ],
    ),
    (
        "quotas: {q: {tokens: 5, window: day, on_store_error: allow}}",
        "quotas: {q: {tokens: 5, window: day, on_store_error: local}}",
        [],
    ),
    (
        "quotas: {q: {tokens: {a: 9, default: 1}, plan: attribute.p, window: day}}",
        "quotas: {q: {tokens: {a: 9, default: 1}, plan: baggage.p, window: day}}",
        ["quota 'q': plan attribute.p -> baggage.p?"],
    ),
    (
        "quotas: {q: {tokens: 50, window: PT1M, pace: smooth}}",
        "quotas: {q: {tokens: 500, window: PT1M, pace: smooth}}",
        ["quota 'q': amount 50 tokens per PT1M -> 500 tokens per PT1M"],
    ),
    # a month has more than 30 days on average
    (
        "quotas: {q: {tokens: 100, window: P30D}}",
        "quotas: {q: {tokens: 101, window: month}}",
        ["quota 'q': amount 100 tokens per P30D -> 101 tokens per month?"],
    ),
    (
        (
            "defaults: {conversation_idle: 1h, unpriced: halt, conversation_on_store_error: deny,"
            " tree: {max_turns: 3}}"
        ),
        "defaults: {conversation_idle: 59m, conversation_on_store_error: allow}",
        [
            "all agents: tree_max_turns 3 -> no limit",
            "all agents: conversation_idle 1h -> 59m",
            "all agents: conversation_on_store_error deny -> allow",
            "all agents: unpriced halt -> unset",
        ],
    ),
    (
        "{quotas: {q: {usd: 1, window: day}}, models: {m: {price: {input: 3, output: 9}}}}",
        "{quotas: {q: {usd: 1, window: day}}, models: {m: {price: {input: 2, output: 9}}}}",
        ['models["m"] price {input: 3, output: 9} -> price {input: 2, output: 9}'],
    ),
    (
        (
            "{agents: {'w[0-9]': {tree: {max_cost_usd: 1}}},"
            " models: {m: {price: {input: 3, output: 9, tiers: [{above: 10, input: 5}]}}}}"
        ),
        (
            "{agents: {'w[0-9]': {tree: {max_cost_usd: 1}}},"
            " models: {m: {price: {input: 3, output: 9, tiers: [{above: 10, input: 4}]}}}}"
        ),
        [
            (
                'models["m"] price {input: 3, output: 9, tiers: [{above: 10, input: 5}]} -> '
                "price {input: 3, output: 9, tiers: [{above: 10, input: 4}]}?"
            )
        ],
    ),
    # a set of characters, also as it is written for a name with a bracket
    (
        "agents: {'w[0-9]': {limits: {max_turns: 2}}, 'w[[]1]': {limits: {max_turns: 2}}}",
        (
            "agents: {'w[0-9]': {limits: {max_turns: 2}, action: observe},"
            " 'w[[]1]': {limits: {max_turns: 20}}}"
        ),
        ["agent 'w[[]1]': max_turns 2 -> 20", "agent 'w[0-9]': action halt -> observe"],
    ),
    (
        "tools: {'poll_[ab]': {exempt: false, action: halt}}",
        "tools: {'poll_[ab]': {exempt: true, failures: marked}}",
        [
            'tools["poll_[ab]"].exempt false -> true',
            'tools["poll_[ab]"].action halt -> unset',
            'tools["poll_[ab]"].failures unset -> marked?',
        ],
    ),
    # a name that a set matches gets an entry
    (
        "agents: {'[!a]': {limits: {max_turns: 1}}}",
        "agents: {'[!a]': {limits: {max_turns: 1}}, b: {limits: {max_turns: 2}}}",
        ["agent 'b': max_turns 1 -> 2"],
    ),
    # two globs that match the same names, and two that do not
    (
        "agents: {'res*': {limits: {max_turns: 3}}, 'res[0-9]': {limits: {max_turns: 3}}}",
        (
            "agents: {'res*': {limits: {max_turns: 3}}, 'res[0-9]': {limits: {max_turns: 3}},"
            " '*archer': {limits: {max_turns: 60}}}"
        ),
        ["agents that match 'res*' and '*archer': max_turns 3 -> 60"],
    ),
    (
        "agents: {'*a': {limits: {max_turns: 60}}, 'a*': {limits: {max_turns: 5}}}",
        "agents: {'a*': {limits: {max_turns: 5}}, '*a': {limits: {max_turns: 60}}}",
        ["agents that match 'a*' and '*a': max_turns 5 -> 60"],
    ),
    (
        "agents: {'[!ac]*': {limits: {max_turns: 2}}}",
        "agents: {'[!ac]*': {limits: {max_turns: 2}}, '[a-c]xyz': {limits: {max_turns: 60}}}",
        ["agents that match '[!ac]*' and '[a-c]xyz': max_turns 2 -> 60"],
    ),
    # one of the two has the same change, and is listed alone
    (
        "{defaults: {limits: {max_turns: 3}}, agents: {'res*': {limits: {max_turns: 3}}}}",
        (
            "{defaults: {limits: {max_turns: 3}},"
            " agents: {'res*': {limits: {max_turns: 3}}, '*archer': {limits: {max_turns: 60}}}}"
        ),
        ["agent '*archer': max_turns 3 -> 60"],
    ),
    (
        "agents: {'a*': {limits: {max_turns: 2}}}",
        "agents: {'a*': {limits: {max_turns: 2}}, 'a**': {limits: {max_turns: 60}}}",
        ["agent 'a*': max_turns 2 -> 60", "agent 'a**': max_turns 2 -> 60"],
    ),
    # a glob with more characters matches only some of the names
    (
        (
            "agents: {'w?': {limits: {max_turns: 2}}, 'w[!a]': {limits: {max_turns: 2}},"
            " 'a*': {limits: {max_turns: 2}}, 'a?*': {limits: {max_turns: 2}}}"
        ),
        (
            "agents: {'w?': {limits: {max_turns: 60}}, 'w[!a]': {limits: {max_turns: 2}},"
            " 'a*': {limits: {max_turns: 60}}, 'a?*': {limits: {max_turns: 2}}}"
        ),
        ["agent 'w?': max_turns 2 -> 60", "agent 'a*': max_turns 2 -> 60"],
    ),
    # a third glob applies to all of them
    (
        "agents: {'*r': {limits: {max_turns: 3}}, 'res*': {limits: {max_turns: 60}}}",
        (
            "agents: {'*r': {limits: {max_turns: 3}}, 'res*': {limits: {max_turns: 60}},"
            " 'research-*': {limits: {max_turns: 60}}}"
        ),
        [],
    ),
    # the defaults apply to none
    (
        (
            "{defaults: {limits: {max_turns: 3}}, quotas: {q: {concurrency: 2}},"
            " agents: {'*': {limits: {max_turns: 2}, action: observe}}}"
        ),
        (
            "{defaults: {limits: {max_turns: 4}}, quotas: {q: {concurrency: 2, action: observe}},"
            " agents: {'*': {limits: {max_turns: 2}, action: observe}}}"
        ),
        [],
    ),
    # the most specific of three still applies
    (
        "agents: {'*': {limits: {max_turns: 60}}, 'a*': {limits: {max_turns: 5}}}",
        "{defaults: {limits: {max_turns: 9}}, agents: {'a*': {limits: {max_turns: 5}}}}",
        [],
    ),
    (
        "tools: {'*h': {exempt: false}, ssh: {exempt: false}, 's*': {exempt: true}}",
        "tools: {'s*': {exempt: true}}",
        ['tools["ssh"].exempt false -> true', 'tools["*h" and "s*"].exempt false -> true'],
    ),
    (
        (
            "{defaults: {limits: {max_cost_usd: 1}},"
            " models: {'*x': {price: {input: 1, output: 9}}, 'x*': {price: {input: 5, output: 9}}}}"
        ),
        (
            "{defaults: {limits: {max_cost_usd: 1}},"
            " models: {'x*': {price: {input: 5, output: 9}}, '*x': {price: {input: 1, output: 9}}}}"
        ),
        ['models["x*" and "*x"] price {input: 5, output: 9} -> price {input: 1, output: 9}'],
    ),
    # the last of the globs is only for one vendor
    (
        (
            "{quotas: {q: {usd: 1, window: day}}, models: {'*b': {price: {input: 1, output: 9}},"
            " 'a*': {price: {input: 5, output: 9}},"
            " 'a**': {price: {input: 9, output: 9}, provider: azure}}}"
        ),
        (
            "{quotas: {q: {usd: 1, window: day}}, models: {'a*': {price: {input: 5, output: 9}},"
            " '*b': {price: {input: 1, output: 9}},"
            " 'a**': {price: {input: 9, output: 9}, provider: azure}}}"
        ),
        ['models["a*" and "*b"] price {input: 5, output: 9} -> price {input: 1, output: 9}'],
    ),
]


def test_every_change_that_may_loosen_a_limit_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, events: list[Event]
) -> None:
    """Quotas, prices and exemptions protect from a runaway agent as much as caps."""
    path, now = tmp_path / "limits.yaml", [0.0]
    enable(observers=[events.append])
    for before, after, phrases in LOOSER_VERSIONS:
        path.write_text(before)
        file = PolicyFile(str(path), clock=lambda: now[0])
        assert not file.mistakes
        path.write_text(f"{after} # another version")
        now[0] += 2
        caplog.clear()
        file.refresh()
        assert not file.mistakes
        read = [event for event in events if isinstance(event, PolicyRead)][-1]
        found = [each.replace(NOT_COMPARABLE, "?") for each in read.loosened]
        assert (after, found) == (after, phrases)
        unsure = [each for each in phrases if each.endswith("?")]
        assert caplog.text.count("may loosen a limit") == len(unsure)
        assert caplog.text.count("loosens a limit") == len(phrases) - len(unsure)


def test_many_changed_patterns_are_not_called_unchanged() -> None:
    """Comparing each two of them would block the event loop of the agent that reads the file."""
    three, two, four = (
        parse(
            "agents:\n"
            + "".join(f"  a{n}*: {{limits: {{max_turns: {cap}}}}}\n" for n in range(320))
            + "  b: {limits: {max_turns: 3}}",
            "limits.yaml",
        )[0]
        for cap in (3, 2, 4)
    )
    unsure = f"agents that match several patterns: max_turns{NOT_COMPARABLE}"
    found = loosened(three, four, Policy())
    assert found == (*(f"agent 'a{n}*': max_turns 3 -> 4" for n in range(320)), unsure)
    assert loosened(two, two, Policy()) == ()
    assert loosened(three, two, Policy()) == ()


def test_every_part_of_a_policy_is_compared_with_that_of_an_earlier_version() -> None:
    """A new setting either can loosen limits, or is listed here."""
    texts = {"name", "origin", "halt_message", "halted_node", "warn_at", "budget_hints"}
    by_hand = {"limits", "tree", "conversation", "exempt_tools", "watched_tools", "quotas"}
    by_tool = {"actions_by_tool", "failures_by_tool", "nudge_disabled", "origins"}
    amounts = {"unit", "amount", "windows", "burst", "plan", "plans", "keys", "action", "fair_by"}
    known = {
        *texts,
        *by_hand,
        *by_tool,
        *amounts,
        *policy.COMPARED,
        *quota.COMPARED,
        *quota.COMPARED_IF,
    }
    assert {each.name for part in (Policy, quota.Quota) for each in fields(part)} == known
