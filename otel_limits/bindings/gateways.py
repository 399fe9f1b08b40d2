"""Classifies errors of gateways and vendors, such as a refusal because a budget is spent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from otel_limits.core.limits import QUOTA_EXCEEDED_STOP_REASON, Breach
from otel_limits.core.policy import Verdict
from otel_limits.core.texts import GATEWAY_BUDGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAYMENT_REQUIRED: Final = 402
STATUSES: Final = (PAYMENT_REQUIRED, 422, 429)
"""Statuses of budget refusals: payment required, unprocessable, too many requests."""

REFUSED: Final = 400
"""The lowest status of a refusal."""
FORBIDDEN: Final = 403

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

BUDGET_SPENT: Final = re.compile(
    r"budget.{0,40}(exceed|exhaust|spent|reached|limit)|(exceed|exhaust|over).{0,40}budget"
    r"|insufficient[_ ](quota|credit|funds|balance)|out of credits|spend(ing)?[_ ]limit",
    re.IGNORECASE,
)
"""Messages of LiteLLM, OpenAI, OpenRouter and others. A plain rate limit does not match."""

CREDIT_SPENT: Final = re.compile(
    # Anthropic, as a bad request: https://github.com/anthropics/claude-code/issues/66314, 38035.
    r"credit balance is too low|reached your specified API usage limits"
    # OpenAI, as a bad request: https://github.com/dfinke/PowerShellAI/issues/127.
    r"|billing hard limit"
    # OpenRouter, as forbidden: https://github.com/RooCodeInc/Roo-Code/issues/515.
    r"|key limit exceeded"
    # xAI, as forbidden: https://github.com/Anantys-oss/koan/issues/2412.
    r"|used all available credits|run out of credits",
    re.IGNORECASE,
)
"""Messages of vendors that use a general status, such as 400 or 403."""

QUOTA_SPENT: Final = re.compile(r"quota.{0,20}exceeded", re.IGNORECASE)
"""Also means a spent budget, unless the vendor calls a rate a quota."""

RATE: Final = re.compile(
    r"per[_ -]?(min|sec)|retry[_ -]?(in|after|delay|info)|\.googleapis\.com", re.IGNORECASE
)
"""Marks of a rate. Google calls every rate a quota, sometimes without its period."""

LASTING: Final = re.compile(r"per[_ -]?(day|month)", re.IGNORECASE)
"""A quota too long for retries. Google gives a retry delay of seconds even for daily quotas."""


def budget_refusal(error: BaseException) -> Verdict | None:
    """Return the halt for a provider's budget refusal, or `None` for any other error."""
    if not any(_is_budget_spent(each) for each in chain_of(error)):
        return None
    reason, note = (
        QUOTA_EXCEEDED_STOP_REASON,
        "a gateway or vendor reports that its budget is spent",
    )
    breach = Breach(GATEWAY_BUDGET, 1, 1, reason, "refusals by the gateway", note=note)
    return Verdict(QUOTA_EXCEEDED_STOP_REASON, (breach,))


def _is_budget_spent(error: BaseException) -> bool:
    # The status first, as only the text of a refusal is evidence: models write about budgets, too.
    status = status_of(error)
    if status in (REFUSED, FORBIDDEN):
        return CREDIT_SPENT.search(_text_of(error)) is not None
    return status == PAYMENT_REQUIRED or (status in STATUSES and _text_means_spent(_text_of(error)))


def _text_means_spent(text: str) -> bool:
    if BUDGET_SPENT.search(text):
        return True
    # A rate limit passes and the client retries; a daily quota does not.
    is_rate = RATE.search(text) is not None and LASTING.search(text) is None
    return QUOTA_SPENT.search(text) is not None and not is_rate


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes; providers wrap errors of the HTTP client."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        # A cause is set explicitly; the context is only the error that was being handled.
        current = current.__cause__ or current.__context__


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
    return any(getattr(each, "code", None) == CONTENT_FILTER for each in chain_of(error))


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
    return any(CUT.search(str(each)) is not None for each in chain_of(error))


def _is_of_stream(error: BaseException) -> bool:
    """Return whether an error came as an event of a stream, after status 200."""
    return type(error).__name__ == "EventStreamError"  # botocore still gives it a status


def status_of(error: BaseException) -> int | None:
    """Return the status in an error of a client library, including errors within a stream."""
    return _status_in(error, (*OF_RESPONSE, "code"))


def _status_in(error: BaseException, names: Sequence[str]) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
    for holder in (response, error):
        for name in names:
            status = getattr(holder, name, None)
            if isinstance(status, int) and not isinstance(status, bool):
                return status
    return None


def _text_of(error: BaseException) -> str:
    """Return the text of a refusal. A body that is still streaming is not read."""
    response = getattr(error, "response", None)
    try:
        body = getattr(response, "text", "")
    except Exception:  # noqa: BLE001  httpx raises when the body was not read
        body = ""
    # `body` is where the SDKs of OpenAI and Anthropic keep the parsed answer.
    return f"{error} {getattr(error, 'body', '')} {body}"
