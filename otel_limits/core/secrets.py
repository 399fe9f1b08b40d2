"""Redacts secrets in URLs, connection strings, messages, and values that a message quotes."""

from __future__ import annotations

import base64
import itertools
import json
import re
import reprlib
import string
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Final
from urllib.parse import quote, unquote, unquote_plus

from otel_limits.core.wording import compiled

STARS: Final = "***"

TELLING_NAME: Final = "(?:pass|pwd|secret|token|key|auth|cred|sig)"
"""A part of the names of parameters whose values are redacted."""

QUOTED: Final = (
    r"(?P<escape>\\*)(?P<quote>['\"])(?s:(?!(?<!\\)(?P=escape)(?P=quote)).)*"
    r"(?:(?P=escape)(?P=quote))?"
)
"""A value in quotes, as in JSON, in Python, or in JSON that is itself a text; it may be cut."""

SECRET_VALUE: Final = re.compile(
    rf"(?i)(?<![\w.-])(?=[\w.-]*{TELLING_NAME})([\w.-]+\s*=\s*)"
    rf"({QUOTED}|[^&;\s'\"]+)"
)
"""Such a parameter of a PostgreSQL connection string, or of any text.

Each word is tried from its beginning only, so the time for a long one is linear."""

CREDENTIAL: Final = (
    r"authorization|cookie|passw(?:or)?d|passphrase|pwd|secret|token|credentials?|signature"
    r"|(?:api|access|account|private|shared|subscription|auth)[-_]?key"
)
"""Words in the names of headers and fields with a secret. Not every word with `key` in it: there is
no secret in `KeyError: 'name'` and "no such key: name"."""

SCHEME: Final = "(?:basic|bearer|digest|token|api-?key|negotiate)"
"""How the value of the header `Authorization` begins."""

PARAMETER: Final = r"[\w-]+=(?:\"[^\"]*\"?|[^\s,;'\"\\]+)"

HEADER: Final = (
    rf"(?i)(?<![\w-])(?=[\w-]*(?:{CREDENTIAL})(?![^\W_]))"
    rf"([\w-]+\\*['\"]?\s*:\s*)"
    rf"({QUOTED}|[\[{{][^\]}}]*[\]}}]?"  # several values
    rf"|(?:[\w-]+\s+)?{PARAMETER}(?:[,;]\s*{PARAMETER})*"  # of a cookie, or of a signed request
    rf"|(?:{SCHEME}\s+)?\\*[^\s,;'\"\\]+)"
)
"""A header, or a field of JSON, with a secret. As above, each word is tried once."""

OPTION: Final = (
    rf"(?i)(?<![\w-])(?=--[\w-]*(?:{CREDENTIAL})(?![^\W_]))"
    rf"(--[\w-]+['\"]?,?\s+)(?!['\"]?-)(?=\S*[\d._~+/=-])(?:{QUOTED}|[^\s'\"]+)"
)
"""An option of a command line with its value, unless that is an ordinary word."""

PRIVATE_KEY: Final = r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z -]*|$)"

BEARER: Final = r"(?i)\b(bearer|basic)(\s+)(?=\S*[\d._~+/=-])[\w.~+/=-]+"
"""The value of such a header without its name."""

KEY: Final = (
    r"(?<![\w-])(?:"
    r"(?:sk|pk|rk|xai|pplx|glpat|xox[a-z]|ya29)[-_.]"
    r"(?=[\w.-]{0,64}\d)[\w.-]{8,}"  # a key has digits, other than `sk-learn-pipeline`
    r"|(?:gsk|npm|gh[opsur]|github_pat)_\w{8,}"
    r"|hf_[A-Za-z\d]{30,}"  # of Hugging Face, has letters only
    r"|(?:AKIA|ASIA|AIza)[\w-]{12,}"  # of AWS, of Google
    r"|eyJ[\w-]{8,}\.[\w.-]+"  # a JSON web token
    r")"
)
"""A key of a known vendor, by its beginning."""

LONG_WORD: Final = r"(?<![\w/+.-])[\w/+-]{32,}={0,2}"
"""A word that may be a key of any vendor: see `_mask_if_random`."""

RANDOM: Final = 0.35
"""How often the kinds of characters in a key change at least, for each of its characters.

Of random letters and digits, 0.3% of 32 and 0.1% of 40 change less often; long names of agents and
models do up to 0.32 (measured on 2026-11-30).
"""

ASSIGNMENT: Final = rf"(?<![\w.-])([A-Z][A-Z\d_]{{2,}}=)(?:{QUOTED}|[^\s,;]+)"
"""A line of an .env file. Its value may be a secret, whatever its name is."""

SCHEME_OF_URL: Final = string.ascii_letters + string.digits + "+-."

USER: Final = re.compile(r"[\w.+%-]*")
"""A name that can be shown; anything else before an `@` may be part of a password."""

HOST: Final = re.compile(r"\[[0-9A-Fa-f:.%]*\](:\d*)?|[^:\[\]]*(:\d*)?")
"""A host with its port. Anything else after the colon may mean a user with a password."""

ACCOUNT: Final = re.compile(r"(?i)postgres|mysql")
"""Schemes whose user is only a name; elsewhere it may be a token or a password."""

TELLING: Final = 4
"""Characters of a secret that are redacted anywhere; a shorter one only as a whole word."""

CUT: Final = 8
"""Characters at the beginning of a secret that are redacted without the rest, because servers cut
long texts."""


SHOWN: Final = 100
"""Characters of a given value that are shown."""

LONGEST: Final = 10_000
"""Characters that are examined for secrets; the others are not shown."""


def redact_url(text: str) -> str:
    """Return a URL without its secrets.

    Passwords may contain any character, even ones that must be escaped: everything up to the last
    `@` belongs to user and password. When in doubt, redact.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or "@" in scheme:
        separator = ""
        scheme, rest = "", text
    # Up to the last `@`: a password may contain one, a host never does.
    credentials, at, place = rest.rpartition("@")
    # Without a scheme, the text before an `@` may be an ordinary name; with a colon in it, it is
    # treated as a user with a password.
    if at and (separator or ":" in credentials):
        rest = _masked_user(credentials, scheme) + at + _masked_hosts(place)
    elif separator:
        rest = _masked_hosts(rest)
    # The value of a parameter of a URL ends at the next parameter only.
    place, mark, query = rest.partition("?") if separator else (rest, "", "")
    masked = "&".join(map(_masked_parameter, query.split("&")))
    return SECRET_VALUE.sub(rf"\1{STARS}", scheme + separator + place) + mark + masked


def redact_message(text: str) -> str:
    """Return a third-party message, such as the error of a tool, without the secrets in it."""
    text = SECRET_VALUE.sub(rf"\1{STARS}", compiled(PRIVATE_KEY).sub(STARS, text))
    # Only a URL may have a password with blanks: before it, an `@` concerns its own word.
    words = text.partition("://")[0]
    words = words.rstrip(SCHEME_OF_URL) if words != text else text
    url = text.removeprefix(words)
    text = re.sub(r"\S+", lambda word: redact_url(word[0]), words) + redact_url(url)
    for pattern in (HEADER, OPTION):
        text = compiled(pattern).sub(rf"\1{STARS}", text)
    text = compiled(KEY).sub(STARS, compiled(BEARER).sub(rf"\1\2{STARS}", text))
    return compiled(LONG_WORD).sub(_mask_if_random, text)


def _mask_if_random(word: re.Match[str]) -> str:
    """Mask a word of lower case, upper case and digits that change as often as in a key."""
    kinds = [each.isdigit() + 2 * each.isupper() for each in word[0] if each.isalnum()]
    changes = sum(one != next_one for one, next_one in itertools.pairwise(kinds))
    is_random = set(kinds) == {0, 1, 2} and changes >= RANDOM * len(kinds)
    return STARS if is_random else word[0]


def redact_value(text: str) -> str:
    """Return a value that a user gave, such as that of a setting, without the secrets in it.

    It can be anything by mistake: an address, a key, a header, or a line of an .env file.
    """
    return compiled(ASSIGNMENT).sub(rf"\1{STARS}", redact_message(redact_url(text)))


def quote_value(value: object) -> str:
    """Return a value that a user gave, for a message: in quotes, short, and without secrets."""
    return QUOTER.repr(value)


def redact_text(sentence: str, words: Iterable[str]) -> str:
    """Redact secrets in a third-party message that may quote the command line.

    Args:
        sentence: The message.
        words: The words of the command line.
    """
    for word in words:
        # Argument parsers quote `--name=value` as a whole or only its value, as typed or as Python
        # `repr`.
        for piece in (word, word.partition("=")[2]):
            if piece != (redacted := redact_value(piece)):
                sentence = sentence.replace(piece, redacted)
                sentence = sentence.replace(repr(piece), repr(redacted))
    return sentence


def secrets_in(address: str) -> frozenset[str]:
    """Return the secrets of an address, in every form in which a server may receive them."""
    scheme, separator, rest = address.partition("://")
    credentials, _, _ = (rest if separator else address).rpartition("@")
    _, colon, password = credentials.replace("%3A", ":").replace("%3a", ":").partition(":")
    place, _, query = address.partition("?") if separator else (address, "", "")
    raw = [found[2].strip("'\"") for found in SECRET_VALUE.finditer(place)]
    parameters = (each.partition("=") for each in query.split("&"))
    raw += [value for name, _, value in parameters if _is_secret(name)]
    if colon or not ACCOUNT.search(scheme):
        raw.append(password if colon else credentials)
    # As in the header of an HTTP request.
    pair = base64.b64encode(unquote(credentials).encode("utf-8", "surrogateescape")).decode()
    forms = {form for each in raw for form in (each, unquote(each), unquote_plus(each))}
    return frozenset(forms | ({pair} if credentials else set())) - {"", STARS}


def redact_secrets(text: str, secrets: Collection[str]) -> str:
    """Redact secrets by their value in a third-party text that may repeat them."""
    # The longest first: it may contain another.
    forms = sorted({form for each in secrets for form in _shown_forms(each)}, key=len, reverse=True)
    # Whole ones first: they may begin like one that was cut.
    for form in forms:
        if len(form) >= TELLING:
            text = text.replace(form, STARS)
    for form in forms:
        text = _without(text, form)
    return text


def _shown_forms(secret: str) -> set[str]:
    """Return a secret as it is, and as a text, JSON, bytes or a URL quote it."""
    encoded = quote(secret, safe="", errors="surrogateescape")
    quoted = {encoded, re.sub("%[0-9A-F]{2}", lambda each: each[0].lower(), encoded)}
    in_bytes = repr(secret.encode("utf-8", "surrogateescape"))[2:-1]
    return {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], in_bytes, *quoted}


def redact_error(error: BaseException, redact: Callable[[str], str]) -> None:
    """Redact an error and its causes in place, because a traceback shows the texts of all."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.args = tuple(redact(each) if isinstance(each, str) else each for each in found.args)
        if isinstance(found, OSError) and isinstance(found.strerror, str):  # shown instead of those
            found.strerror = redact(found.strerror)
        found = found.__cause__ or found.__context__


def _without(text: str, secret: str) -> str:
    """Return a text without a secret, or without its beginning."""
    if len(secret) < TELLING:
        return re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", STARS, text)
    first, *others = text.split(secret[:CUT])
    # Without what follows of the secret.
    known = (commonprefix([each, secret[CUT:]]) for each in others)  # noqa: RUF071  by letters
    return STARS.join([first, *map(str.removeprefix, others, known)])


def _masked_user(credentials: str, scheme: str) -> str:
    """Keep the user's name if it is one."""
    user, colon, _ = credentials.partition(":")
    if not USER.fullmatch(user) or ":" in unquote(user) or not (colon or ACCOUNT.search(scheme)):
        return STARS
    return f"{user}:{STARS}" if colon else user


def _masked_parameter(parameter: str) -> str:
    """Redact the value of a parameter of a URL if its name is that of a secret."""
    name, equals, _ = parameter.partition("=")
    return f"{name}={STARS}" if equals and _is_secret(name) else parameter


def _is_secret(name: str) -> bool:
    return re.search(TELLING_NAME, unquote(name), re.IGNORECASE) is not None


def _masked_hosts(rest: str) -> str:
    """Redact everything after the host if it is not a port, because an `@` was forgotten."""
    # Several hosts, as of a replica set or a cluster, are separated by commas.
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if all(HOST.fullmatch(host) for host in hosts.split(",")):
        return rest
    return f"{hosts.partition(':')[0].strip('[]')}:{STARS}"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A value that is never printed."""

    value: str

    def __str__(self) -> str:
        """Return stars."""
        return STARS

    def __repr__(self) -> str:
        """Return stars, recognizable as a secret."""
        return f"Secret({STARS})"


class Quoter(reprlib.Repr):
    """Quotes values, also within lists and mappings, which aliases of YAML can make very long."""

    def __init__(self) -> None:
        """Set the longest parts."""
        super().__init__()
        self.maxlevel = 2
        self.maxlong = 40
        self.maxother = LONGEST  # redacted before it is cut

    def repr_str(self, text: str, level: int) -> str:  # noqa: ARG002  of its base
        """Quote a text. Several lines are probably a file, and any of them can be a secret."""
        if "\n" in text:
            return f"a text of {len(text.splitlines()):,} lines"
        return repr(_short(redact_value(text[:LONGEST])))

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Quote a mapping without its secrets, by their names."""
        shown = {key: STARS if _is_secret(str(key)) else each for key, each in value.items()}
        return super().repr_dict(shown, level)

    def repr_instance(self, value: Any, level: int) -> str:
        """Quote anything else, such as a path or a kind of text."""
        return _short(redact_value(super().repr_instance(value, level)))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}\N{HORIZONTAL ELLIPSIS}"


QUOTER: Final = Quoter()
