"""No command shows a secret, however the address is written that has it, or ends in a traceback."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.cli import main
from otel_limits.cli.doctor import runaway
from otel_limits.cli.doctor.launcher import UnknownLauncherError, read_launcher
from otel_limits.core.failures import first_line
from otel_limits.core.limits import LIMITS
from otel_limits.core.secrets import quote_value, redact_secrets, redact_url, secrets_in
from otel_limits.quotas.section import WrittenQuota
from otel_limits.settings.policy.reader import File, Section, WrittenTool, parse
from otel_limits.settings.settings_reader import VARIABLES

SECRET = "s3cr3t"  # noqa: S105  what must not be seen

HOSTILE = (
    f"redis://user:{SECRET}@127.0.0.1:1/0",
    f"redis://:{SECRET}@127.0.0.1:1",
    f"redis://user:{SECRET}",
    f"redis://user:a/{SECRET}@127.0.0.1:1/0",
    f"redis://u:[{SECRET}@127.0.0.1:1",
    f"redis+cluster://u:{SECRET}@127.0.0.1:1",
    f"redis+sentinel://u:{SECRET}@127.0.0.1:1/main",
    f"postgresql://bob:a/{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a?{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a#{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a@{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:{SECRET}",
    f"postgresql://bob@127.0.0.1:{SECRET}/ledger",
    f"postgresql://127.0.0.1:1/ledger?user=bob&password={SECRET}",
    f"postgresql://127.0.0.1:1/ledger?password=a;{SECRET}",
    f"postgresql://bob%3A{SECRET}@127.0.0.1:1/ledger",
    f"redis://127.0.0.1:1/0?p%61ssword=a'{SECRET}",
    f"postgresql://bob:[{SECRET}@127.0.0.1:1/ledger",
    f"mysql://bob:{SECRET}@127.0.0.1/ledger",
    f"sqlite://u:{SECRET}@h",
    f"sqlite://u:{SECRET}@h/[",
    f"http://u:{SECRET}@127.0.0.1:1",
    f"http://u:a/{SECRET}@127.0.0.1:1",
    f"http://{SECRET}@127.0.0.1:1",
    f"http://u:{SECRET}@[127.0.0.1:1",
    f"http://u:[{SECRET}]@127.0.0.1:1",
    f"http://127.0.0.1:{SECRET}",
    f"http://127.0.0.1:1/?token={SECRET}",
    f"https://127.0.0.1:1/?api_key={SECRET}",
    f"bob:{SECRET}@127.0.0.1/ledger",
    f"host=127.0.0.1 user=bob password='{SECRET}'",
    f"://u:{SECRET}@",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that takes an address for a file name must not leave it in the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runaway, "examine", lambda *_: [])  # it knows none of the variables


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Everything that a command says."""
    try:
        main(arguments)
    except SystemExit as ending:
        assert ending.code == 2  # noqa: PT017  of argparse, which has said why
    said = capfd.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("url", HOSTILE)
def test_refusal_of_doctor_shows_no_secret(url: str) -> None:
    """Not of an unknown command, and not of a value before it."""
    for command in ((url,), ("env", f"URL={url}", "x"), ("uv", "run", url), ("timeout", url, "x")):
        with pytest.raises(UnknownLauncherError) as refused:
            read_launcher(command)
        assert SECRET not in refused.value.text + refused.value.advice


SECRETS = (
    f"postgres://u:{SECRET}@h/db",
    f"sk-proj-{SECRET}{SECRET}1234",
    f"Bearer {SECRET}.abc",
    f"STRIPE={SECRET}",
    f"eyJhbGciOiJI.eyJ{SECRET}.x",
    f"A=b\nDATABASE_URL=postgres://u:{SECRET}@h/db\nSTRIPE={SECRET}",
)
"""Each may be pasted in place of any value."""

QUOTA = "quotas: {q: {tokens: 5000, window: day, %s}}"

PLACES = (
    "%s",
    "[%s]",
    "{%s: 1}",
    *(f"{key}: %s" for key in File.model_fields),
    *(f"{key}: {{%s: {{x: 1}}}}" for key in File.model_fields),
    *(f"{key}: {{%s: 1}}" for key in File.model_fields),
    *(f"defaults: {{{key}: %s}}" for key in Section.model_fields),
    *(f"defaults: {{{key}: [%s]}}" for key in Section.model_fields),
    *(f"defaults: {{{key}: {{%s: x}}}}" for key in Section.model_fields),
    *(f"defaults: {{limits: {{{name}: %s}}}}" for name in LIMITS),
    *(f"defaults: {{limits: {{{name}: {{%s: x}}}}}}" for name in LIMITS),
    "agents: {%s: {limits: {max_turns: x}}}",
    *(f"models: {{m: {{{key}: %s}}}}" for key in ("price", "as", "provider", "local", "x")),
    "models: {m: {price: {input: %s, output: 1}}}",
    "models: {m: {price: {input: 1, output: 1, tiers: [{above: %s}]}}}",
    "models: {%s: {as: nothing}}",
    *(f"tools: {{t: {{{key}: %s}}}}" for key in WrittenTool.model_fields),
    *(f"quotas: {{q: {{window: day, {key}: %s}}}}" for key in WrittenQuota.model_fields),
    *(QUOTA % f"{key}: %s" for key in WrittenQuota.model_fields),
    *(QUOTA % f"{key}: {{%s: x}}" for key in WrittenQuota.model_fields),
    QUOTA % "key: agent, keys: {%s: x}",
    QUOTA % "key: '{agent}-{model}', keys: {%s: 5}",
    "quotas: {%s: {tokens: 5, window: day}}",
    "quotas: {q: {tokens: 5, window: %s, time_zone: Europe/Berlin}}",
    "{%s: 1, %s: 2}",
)
"""Every place of a policy file."""


def test_no_secret_of_a_policy_file_is_shown() -> None:
    """A value, a key or a name that is pasted from elsewhere must not reach a log."""
    for place in PLACES:
        for secret in SECRETS:
            text = place.replace("%s", json.dumps(secret))
            _, mistakes = parse(text, "limits.yaml")
            assert SECRET not in "".join(mistakes), text


def test_no_secret_of_another_file_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as the .env file next to it. Nor is one in a valid name."""
    path = tmp_path / "limits.yaml"
    for text, seen in (
        (SECRETS[0], "The file must be a mapping, got text."),
        (SECRETS[-1], "The file must be a mapping, got text."),
        (f"tag: !{SECRETS[0]} 3", "The tag !postgres://u:***@h/db is not allowed"),
        (f'agents: {{"{SECRETS[0]}": {{limits: {{max_turns: 3}}}}}}', 'agents["postgres://u:***@'),
    ):
        path.write_text(text)
        said = shown(capfd, "check", "--policy", str(path))
        assert SECRET not in said
        assert seen in said


def test_no_secret_of_a_variable_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of each, whatever it is meant for."""
    for secret in SECRETS:
        for name in VARIABLES:
            monkeypatch.setenv(name, secret)
        monkeypatch.setenv("OTEL_LIMITS_MAX_CALLS_PER_TOOL", f"{secret}=x")
        for command in (("check", "--all"), ("doctor",), ("audit", "spend")):
            assert SECRET not in shown(capfd, *command), command


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("3x", "'3x'"),
        (3.5, "3.5"),
        (["halt", 3], "['halt', 3]"),
        ("x" * 200, f"'{'x' * 99}\N{HORIZONTAL ELLIPSIS}'"),
        ("search=20,fetch=x", "'search=20,fetch=x'"),
        ("researcher@prod", "'researcher@prod'"),
        ({"url": SECRETS[0]}, "{'url': 'postgres://u:***@h/db'}"),
        (Path(SECRETS[3]), f"{type(Path()).__name__}('STRIPE=***"),
        (SECRETS[-1], "a text of 3 lines"),
    ],
)
def test_given_value_is_quoted(value: object, seen: str) -> None:
    """A mistyped value must be recognized, and a long one need not be shown as a whole."""
    assert quote_value(value).startswith(seen)


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcDEFghiJKLmnoPQRstuVWXyzABCdefGHI",
        "ABSKQmVkcm9ja0FQSUtleS1hYmNkLWF0LTEyMzQ1Njc4OTAxMjpLM3h2L3pRK1d5",
        "q7XzLmK2/9TbVaRwYc8NdHsk+PfG6jAeUoQi1Wn5",
        "x9Kq2LmZ7vTb4RwYc8NdH3sPfG6jAeU5",
        'SLACK="a b c hunter2"',
        {"password": "hunter2"},
    ],
)
def test_key_of_any_vendor_is_not_shown(value: object) -> None:
    """By its form, as its vendor may be unknown."""
    assert re.fullmatch(r"'\*\*\*'|'SLACK=\*\*\*'|\{'password': '\*\*\*'\}", quote_value(value))


@pytest.mark.parametrize(
    "name",
    [
        "CustomerSupportEscalationAgentV2Production",
        "ResearchAgentForTheQuarterlyReport2026",
        "Meta-Llama-3-1-70B-Instruct-Turbo-FP8-dynamic",
        "/home/user/My-Project-2026-Research-Assistant/limits.yaml",
        "0f8fad5b-d9cb-469f-a165-70867728950e",
        "hf-internal-testing-model1",
    ],
)
def test_long_name_is_shown(name: str) -> None:
    """Messages about agents and models would say nothing without it."""
    assert quote_value(name) == repr(name)


def test_header_in_place_of_its_file_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """`--authorization-file` needs a path, and the header itself is an easy mistake."""
    arguments = ("--prometheus", "http://127.0.0.1:1", "--authorization-file", SECRETS[2])
    said = shown(capfd, "audit", "reconcile", *arguments)
    assert SECRET not in said
    assert "Bearer *** cannot be read" in said


@pytest.mark.parametrize(
    ("url", "text", "seen"),
    [
        ("redis://bob:a%2Fbcd@h", "a/bcd a%2Fbcd bob:a/bcd", "*** *** bob:***"),
        ("redis://bob:pw@h", "up, pw, pwd", "up, ***, pwd"),
        ("redis://bob:hunter2000@h", "got 'hunter20", "got '***"),
        ("http://token@h", "no token", "no ***"),
        ("http://bob:secret@h", "Basic Ym9iOnNlY3JldA==", "Basic ***"),
        ("postgresql://bob@h/ledger", "no bob", "no bob"),
        ("redis://h:6379/0?password=a%20bcd", "a bcd", "***"),
    ],
)
def test_secret_is_redacted_in_each_form(url: str, text: str, seen: str) -> None:
    """As in the URL, decoded, in a header, and cut; a short one as a word only."""
    assert redact_secrets(text, secrets_in(url)) == seen


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://user:pw@h:6379/0", "redis://user:***@h:6379/0"),
        ("redis+sentinel://a:1,b:2/main", "redis+sentinel://a:1,b:2/main"),
        ("postgresql://bob@h/ledger?sslmode=require", "postgresql://bob@h/ledger?sslmode=require"),
        ("postgresql://bob:p/w?x@h/ledger", "postgresql://bob:***@h/ledger"),
        ("postgresql://[::1]:5432/ledger", "postgresql://[::1]:5432/ledger"),
        ("https://token@h/v1", "https://***@h/v1"),
        ("/var/lib/ledger.db", "/var/lib/ledger.db"),
        ("sqlite:////var/lib/ledger.db", "sqlite:////var/lib/ledger.db"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_public_parts_of_a_url_are_shown(url: str, seen: str) -> None:
    """A reader must recognize the address."""
    assert redact_url(url) == seen


@given(password=st.text(min_size=1), scheme=st.sampled_from(["redis", "postgresql", "http", "x"]))
def test_no_password_of_any_characters_is_shown(password: str, scheme: str) -> None:
    """Escaped or not."""
    assert redact_url(f"{scheme}://bob:<{password}>@h:1/d") == f"{scheme}://bob:***@h:1/d"


def test_long_setting_is_refused_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    """60,000 characters took more than a minute."""
    begin = time.process_time()
    assert main(["run", "--ledger", "pass" * 15_000, "--max-turns", "x" * 60_000, "--", "a"]) == 2
    assert time.process_time() - begin < 5
    assert "--max-turns must be" in capsys.readouterr().err


KEY = "Zq7Xr2" * 6
"""Mixes cases and digits."""


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (f"error: Authorization: Bearer {SECRET}", "error: Authorization: ***"),
        ("error: Authorization: Bearer x", "error: Authorization: ***"),
        (f"401 with authorization: Basic {SECRET}, retry", "401 with authorization: ***, retry"),
        (f"Proxy-Authorization: {SECRET} at 10:30", "Proxy-Authorization: *** at 10:30"),
        (f"error: x-api-key: {SECRET} was refused", "error: x-api-key: *** was refused"),
        (f"curl -H 'X-Auth-Token: {SECRET}' failed", "curl -H 'X-Auth-Token: ***' failed"),
        (f'error: {{"api_key": "{SECRET} x", "n": 1}}', 'error: {"api_key": ***, "n": 1}'),
        (f"{{'Ocp-Apim-Subscription-Key': '{SECRET}'}}", "{'Ocp-Apim-Subscription-Key': ***}"),
        (f'{{\\"client_secret\\": \\"{SECRET}\\"}}', None),
        (f'"accessToken": "{SECRET}"', '"accessToken": ***'),
        (f"Set-Cookie: sid={SECRET}; Path=/", "Set-Cookie: ***"),
        (f"Cookie: theme=dark; sid={SECRET}, 401", "Cookie: ***, 401"),
        (f'Authorization: Digest username="me", response="{SECRET}"', "Authorization: ***"),
        (f'{{"authorization": ["Bearer {SECRET}"], "n": 1}}', '{"authorization": ***, "n": 1}'),
        (f'{{"secret": "a\\"{SECRET}", "n": 1}}', '{"secret": ***, "n": 1}'),
        (f"{{'password': 'a\\'b {SECRET}'}}", "{'password': ***}"),
        (f"password='a\\'b {SECRET}' refused", "password=*** refused"),
        (
            f"Command 'login --password {SECRET} x' failed",
            "Command 'login --password *** x' failed",
        ),
        (f"['login', '--auth-token', '{SECRET}']", "['login', '--auth-token', ***]"),
        (f"-----BEGIN RSA PRIVATE KEY----- MII{SECRET}/+x {SECRET}", "***"),
        ("q7XzLmK2/9TbVaRwYc8NdHsk+PfG6jAeUoQi1Wn5 is unknown", "*** is unknown"),
        (f"password: {SECRET}", "password: ***"),
        (f"x-api-key={SECRET} refused", "x-api-key=*** refused"),
        (f"invalid bearer {SECRET}.abc", "invalid bearer ***"),
        (f"Incorrect API key provided: sk-proj-{SECRET}_abc.", None),
        (f"key sk-ant-api03-{SECRET}-AA is invalid", "key *** is invalid"),
        (f"no access for ghp_{SECRET}abcdef", "no access for ***"),
        (f"xoxb-123-{SECRET}", "***"),
        (f"AKIA{SECRET.upper()}ABCDEF is unknown", "*** is unknown"),
        (f"eyJhbGciOiJI.eyJ{SECRET}.x expired", "*** expired"),
        (f"cannot use {KEY}", "cannot use ***"),
        (f"https://u:{SECRET}@h/x: Authorization: Bearer {SECRET}", None),
    ],
)
def test_error_of_a_tool_shows_no_secret(error: str, seen: str | None) -> None:
    """In a header, a field, or by the shape of a key: agents call services with them."""
    shown = first_line(error)
    assert not any(each in shown for each in (SECRET, SECRET.upper(), KEY))
    assert seen is None or shown == seen


@pytest.mark.parametrize(
    "error",
    [
        "KeyError: 'name'",
        "AuthenticationError: the account is closed",
        "error: Permission denied (publickey).",
        "error: basic authentication is disabled",
        "error: 12,000 tokens: too many",
        "error: task-5f0c2f6e-3a7e-4c1e-9f64-9d1a0c2b7e11 not found",
        "error: /srv/app/sk-learn/main.py:12: risk-adjusted-returns-of-2026",
        "error: desk-lamp-of-the-second-floor is out of stock",
        "error: no user alice@example.com, see alerts@example.com",
        "fatal: git@github.com: Permission denied",
        "error: sk-learn-pipeline and npm-install-failed-again",
        "error: argument --token expected a value",
        "error: /srv/Project2/0a/Some/Path/with/40/letters/or more",
        "commit 9fceb02d0ae598e95dc970b74767f19372d61af8 is unknown",
    ],
)
def test_error_of_a_tool_is_shown(error: str) -> None:
    """Names and numbers help the operator."""
    assert first_line(error) == error


def test_secret_beyond_the_shown_part_is_redacted() -> None:
    """The line is cut afterwards, so no beginning of a secret is left."""
    assert "s3" not in first_line("x" * 185 + f" sk-{SECRET}" + "y" * 99)
