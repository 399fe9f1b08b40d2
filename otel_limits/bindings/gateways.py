"""Classifies errors of gateways and vendors, such as a refusal because a budget is spent."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.halt_texts import GATEWAY_BUDGET
from otel_limits.core.limits import QUOTA_EXCEEDED_STOP_REASON, Breach
from otel_limits.core.policy import Verdict
from otel_limits.vendors.facts import facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAYMENT_REQUIRED: Final = 402
"""A spent budget at every vendor: OpenRouter, DeepSeek, W&B, and Anthropic's `billing_error`."""

REFUSED: Final = 400
"""The lowest status of a refusal."""

OK: Final = 200
OLLAMA_STREAM: Final = -1
"""Status of an error that Ollama's client found within an answer: ollama, _types.py."""

OF_RESPONSE: Final = ("status_code", "status")
"""Attributes of a response or its error that hold the status; the second is aiohttp's. A `code` may
be any number that the vendor wrote into its message: openai, _exceptions.py."""

LITELLM_STREAM: Final = "MidStreamFallbackError"
HTTPX_REFUSAL: Final = "HTTPStatusError"

UNREADABLE: Final = frozenset(
    {"ChecksumMismatch", "InvalidHeadersLength", "InvalidPayloadLength", "UnknownApiResponseError"}
)
"""Errors of botocore (eventstream.py) and google-genai (errors.py) for an unreadable answer after
status 200. The errors of other clients contain that status."""

CUT: Final = re.compile(
    r"without sending complete message body|incomplete (chunked )?read|IncompleteRead"
    r"|payload is not completed",
    re.IGNORECASE,
)
"""Messages of httpx, urllib3, http.client and aiohttp when a body ends too early."""

NOT_SENT: Final = ("Connect", "Pool")
"""Name prefixes of timeouts that occur before anything is sent."""

CONTENT_FILTER: Final = "content_filter"
"""Azure's error code; no other vendor uses it."""

UNREACHED: Final = frozenset(
    {"ClientConnectorError", "ConnectError", "ConnectionRefusedError", "EndpointConnectionError"}
)
"""Errors of aiohttp, httpx, Python and botocore when a connection fails."""

SPENT: Final = Verdict(
    QUOTA_EXCEEDED_STOP_REASON,
    (
        Breach(
            GATEWAY_BUDGET,
            1,
            1,
            QUOTA_EXCEEDED_STOP_REASON,
            "refusals by the gateway",
            note="a gateway or vendor reports that its budget is spent",
        ),
    ),
)
"""The halt by such a refusal."""


class BudgetRefusals(NamedTuple):
    """The contents of `budget_refusals.yaml`."""

    codes: frozenset[str]
    """Codes and types by which a call is refused because a budget is spent."""
    phrases: Mapping[int, re.Pattern[str]]
    """By status, the text of such a refusal that has no code."""


@functools.cache
def _refusals() -> BudgetRefusals:
    known = facts("bindings/budget_refusals.yaml")
    return BudgetRefusals(
        codes=frozenset(known["codes"]),
        phrases={
            status: re.compile("|".join(phrases), re.IGNORECASE | re.DOTALL)
            for status, phrases in known["phrases"].items()
        },
    )


def budget_refusal(error: BaseException) -> Verdict | None:
    """Return the halt for a vendor's refusal because a budget is spent, else `None`."""
    # Not one that was only being handled: a fallback may have replaced that vendor.
    causes = chain_of(error, only_causes=True)
    refusal = next((each for each in causes if _is_of_vendor(each)), None)
    if refusal is None:
        return None
    # A client may keep the code in the error that it replaces by its own.
    status = status_of(refusal)
    told = [each for each in chain_of(refusal) if status_of(each) in (status, None)]
    if not any(map(_is_budget_spent, told)):
        return None
    return SPENT


def _is_of_vendor(error: BaseException) -> bool:
    return status_of(error) is not None or not _refusals().codes.isdisjoint(_codes_of(error))


def _is_budget_spent(error: BaseException) -> bool:
    status = status_of(error)
    if status == PAYMENT_REQUIRED or not _refusals().codes.isdisjoint(_codes_of(error)):
        return True
    # Only the text of a refusal is evidence: models write about budgets, too.
    phrases = _refusals().phrases.get(status or 0)
    return phrases is not None and phrases.search(_text_of(error)) is not None


def _codes_of(error: BaseException) -> Iterator[str]:
    """Yield the codes in a client's error and in the body of the vendor's response."""
    body = _attribute(error, "body")
    if not isinstance(body, dict):
        try:
            body = json.loads(_body_of(error))
        except ValueError:
            body = None
    inner = body.get("error") if isinstance(body, dict) else None
    for holder in (vars(error), body, inner):
        if isinstance(holder, dict):
            yield from (
                code for name in ("code", "type") if isinstance(code := holder.get(name), str)
            )


def members_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, such as that of a `TaskGroup`; otherwise the error itself."""
    members = _attribute(error, "exceptions")  # Python 3.10 has no class of groups
    if isinstance(members, tuple) and all(isinstance(each, BaseException) for each in members):
        for each in members:
            yield from members_of(each)
    else:
        yield error


def chain_of(error: BaseException, *, only_causes: bool = False) -> Iterator[BaseException]:
    """Yield the error, the members of a group and the causes; providers wrap errors of clients.

    Args:
        error: The outermost error.
        only_causes: Leave out errors that were only being handled when another one was raised.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # A cause is set explicitly; the context is only the error that was being handled.
        cause = current.__cause__ or (None if only_causes else current.__context__)
        members = [each for each in members_of(current) if each is not current]
        pending += [*([] if cause is None else [cause]), *reversed(members)]


def http_status(error: BaseException) -> int | None:
    """Return the status of a vendor's refusal, or `None` if it did not refuse."""
    chain = tuple(chain_of(error))
    # LiteLLM makes up a status for any failure in a stream, and some of its routes send the
    # request only there, so the client's own error is more reliable.
    is_made_up = any(type(each).__name__ == LITELLM_STREAM for each in chain)
    own = (each for each in chain if not is_made_up or type(each).__name__ == HTTPX_REFUSAL)
    statuses = (_status_in(each, OF_RESPONSE) for each in own if not _is_of_stream(each))
    return next((status for status in statuses if status is not None and status >= REFUSED), None)


def is_answer(error: BaseException) -> bool:
    """Return whether an error is an answer, possibly unreadable, to an accepted request."""
    return any(
        type(each).__name__ in UNREADABLE or _status_in(each, OF_RESPONSE) in (OK, OLLAMA_STREAM)
        for each in chain_of(error)
    )


def is_filtered(error: BaseException) -> bool:
    """Return whether a vendor refused a prompt that it has processed and bills.

    Azure: "a 400 error due to a content filter" is charged, as "the prompt was evaluated by the
    service" (https://learn.microsoft.com/azure/ai-foundry/openai/how-to/manage-costs).
    """
    return any(_attribute(each, "code") == CONTENT_FILTER for each in chain_of(error))


def is_unsent(error: BaseException) -> bool:
    """Return whether the connection failed, so the vendor never received the request."""
    return any(type(each).__name__ in UNREACHED for each in chain_of(error))


def is_timeout(error: BaseException) -> bool:
    """Return whether a client stopped waiting for a response that the vendor may be producing."""
    names = [type(each).__name__ for each in chain_of(error)]
    # A timeout before the request was sent costs nothing; one after it may cost the whole answer.
    began = not any(name.startswith(NOT_SENT) for name in names)
    return began and any("Timeout" in name for name in names)


def is_answer_cut(error: BaseException) -> bool:
    """Return whether the body of a response ended early, by the client's message."""
    return any(CUT.search(_as_text(each)) is not None for each in chain_of(error))


def _is_of_stream(error: BaseException) -> bool:
    """Return whether an error came as an event of a stream, after status 200."""
    return type(error).__name__ == "EventStreamError"  # botocore still gives it a status


def status_of(error: BaseException) -> int | None:
    """Return the status in an error of a client library, including errors within a stream."""
    return _status_in(error, (*OF_RESPONSE, "code"))


def _status_in(error: BaseException, names: Sequence[str]) -> int | None:
    response = _attribute(error, "response")
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
    for holder in (response, error):
        for name in names:
            status = _attribute(holder, name)
            if isinstance(status, int) and not isinstance(status, bool):
                return status
    return None


def _text_of(error: BaseException) -> str:
    """Return the text of a refusal."""
    # `body` is where the SDKs of OpenAI and Anthropic keep the parsed answer.
    return f"{_as_text(error)} {_as_text(_attribute(error, 'body'))} {_body_of(error)}"


def _body_of(error: BaseException) -> str:
    """Return the body of a vendor's response; one that is still streaming is not read."""
    return _as_text(_attribute(_attribute(error, "response"), "text"))


def _attribute(holder: object, name: str) -> Any:
    """Return an attribute, or `None` if there is none or it raises, as a response's text may."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001  httpx raises while the body was not read
        return None


def _as_text(value: object) -> str:
    """Return a value as text, without those that are missing or raise."""
    try:
        return "" if value is None else str(value)
    except Exception:  # noqa: BLE001  an error of any library
        return ""
