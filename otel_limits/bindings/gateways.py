"""Recognises a gateway's refusal that says that its budget is spent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from otel_limits.core.halts import GATEWAY_BUDGET
from otel_limits.core.limits import QUOTA_EXCEEDED_STOP_REASON, Breach
from otel_limits.core.policy import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAYMENT_REQUIRED: Final = 402
STATUSES: Final = (PAYMENT_REQUIRED, 422, 429)
"""What gateways answer with: payment required, unprocessable, too many requests."""

REFUSED: Final = 400
"""The lowest status of a refusal."""
FORBIDDEN: Final = 403

OK: Final = 200
OLLAMA_STREAM: Final = -1
"""The status of an error that Ollama's client has read in an answer: ollama, _types.py."""

OF_RESPONSE: Final = ("status_code", "status")
"""What a response, or the error of one, calls its status; the second one is aiohttp's. A `code` may
be any number that the vendor has put into its words: openai, _exceptions.py."""

LITELLM_STREAM: Final = "MidStreamFallbackError"
HTTPX_REFUSAL: Final = "HTTPStatusError"

UNREADABLE: Final = frozenset(
    {"ChecksumMismatch", "InvalidHeadersLength", "InvalidPayloadLength", "UnknownApiResponseError"}
)
"""What botocore (eventstream.py) and google-genai (errors.py) call an answer that came after the
status 200 and cannot be read. What other clients say of one has that status."""

CUT: Final = re.compile(
    r"without sending complete message body|incomplete (chunked )?read|IncompleteRead"
    r"|payload is not completed",
    re.IGNORECASE,
)
"""How httpx, urllib3, http.client and aiohttp say that a body ended too early."""

NOT_SENT: Final = ("Connect", "Pool")
"""How the names of timeouts begin before which nothing was sent."""

CONTENT_FILTER: Final = "content_filter"
"""The code of Azure's error, which no other vendor uses."""

UNREACHED: Final = frozenset(
    {"ClientConnectorError", "ConnectError", "ConnectionRefusedError", "EndpointConnectionError"}
)
"""What aiohttp, httpx, Python and botocore call it when there is no connection."""

BUDGET_SPENT: Final = re.compile(
    r"budget.{0,40}(exceed|exhaust|spent|reached|limit)|(exceed|exhaust|over).{0,40}budget"
    r"|insufficient[_ ](quota|credit|funds|balance)|out of credits|spend(ing)?[_ ]limit",
    re.IGNORECASE,
)
"""How LiteLLM, OpenAI, OpenRouter and others word it. A plain rate limit does not match."""

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
"""What vendors say with a status that means anything else as well."""

QUOTA_SPENT: Final = re.compile(r"quota.{0,20}exceeded", re.IGNORECASE)
"""What means the same, unless it is a rate that is called a quota."""

RATE: Final = re.compile(
    r"per[_ -]?(min|sec)|retry[_ -]?(in|after|delay|info)|\.googleapis\.com", re.IGNORECASE
)
"""How a rate says that it is one. Google calls every rate a quota, some without their time."""

LASTING: Final = re.compile(r"per[_ -]?(day|month)", re.IGNORECASE)
"""A quota that no retry outlasts. Google gives a delay of seconds even with one of a day."""


def budget_refusal(error: BaseException) -> Verdict | None:
    """Return the stop that a provider's error means, or `None` for any other error."""
    if not any(_is_budget_spent(each) for each in chain_of(error)):
        return None
    reason, note = QUOTA_EXCEEDED_STOP_REASON, "a gateway or vendor says that its budget is spent"
    breach = Breach(GATEWAY_BUDGET, 1, 1, reason, "refusals by the gateway", note=note)
    return Verdict(QUOTA_EXCEEDED_STOP_REASON, (breach,))


def _is_budget_spent(error: BaseException) -> bool:
    # The status first, as only the text of a refusal is evidence: models write of budgets, too.
    status = status_of(error)
    if status in (REFUSED, FORBIDDEN):
        return CREDIT_SPENT.search(_text_of(error)) is not None
    return status == PAYMENT_REQUIRED or (status in STATUSES and _text_means_spent(_text_of(error)))


def _text_means_spent(text: str) -> bool:
    if BUDGET_SPENT.search(text):
        return True
    # A rate passes by itself and is for the client to retry; a quota of a day is not.
    is_rate = RATE.search(text) is not None and LASTING.search(text) is None
    return QUOTA_SPENT.search(text) is not None and not is_rate


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those it was raised from; providers wrap what the HTTP client raised."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        # The cause was named by whoever raised it; the context is only what was being handled at
        # the time.
        current = current.__cause__ or current.__context__


def http_status(error: BaseException) -> int | None:
    """Return the status with which a vendor refused, or `None` where it did not refuse."""
    chain = tuple(chain_of(error))
    # LiteLLM makes up a status for whatever fails in a stream, and some of its routes send the
    # request only there: what the client itself has raised knows better.
    is_made_up = any(type(each).__name__ == LITELLM_STREAM for each in chain)
    own = (each for each in chain if not is_made_up or type(each).__name__ == HTTPX_REFUSAL)
    statuses = (_status_in(each, OF_RESPONSE) for each in own if not _is_of_stream(each))
    return next((status for status in statuses if status is not None and status >= REFUSED), None)


def is_answer(error: BaseException) -> bool:
    """Tell whether an error is what a vendor sent, or what nobody could read, after it agreed."""
    return any(
        type(each).__name__ in UNREADABLE or _status_in(each, OF_RESPONSE) in (OK, OLLAMA_STREAM)
        for each in chain_of(error)
    )


def is_filtered(error: BaseException) -> bool:
    """Tell whether a vendor refused a prompt that it has read, and bills.

    Azure: "a 400 error due to a content filter" is charged, as "the prompt was evaluated by the
    service" (https://learn.microsoft.com/azure/ai-foundry/openai/how-to/manage-costs).
    """
    return any(getattr(each, "code", None) == CONTENT_FILTER for each in chain_of(error))


def is_unsent(error: BaseException) -> bool:
    """Tell whether nobody could be reached, so that the vendor knows nothing of the request."""
    return any(type(each).__name__ in UNREACHED for each in chain_of(error))


def is_timeout(error: BaseException) -> bool:
    """Tell whether nobody waited longer for a response that the vendor may be working on."""
    names = [type(each).__name__ for each in chain_of(error)]
    # A timeout before the request was sent costs nothing; one after it may cost the whole answer.
    began = not any(name.startswith(NOT_SENT) for name in names)
    return began and any("Timeout" in name for name in names)


def is_answer_cut(error: BaseException) -> bool:
    """Tell whether the body of a response broke off, where the client says no more than that."""
    return any(CUT.search(str(each)) is not None for each in chain_of(error))


def _is_of_stream(error: BaseException) -> bool:
    """Tell an error that came as an event of a stream, after the status 200."""
    return type(error).__name__ == "EventStreamError"  # botocore has a status in it all the same


def status_of(error: BaseException) -> int | None:
    """Return the status that an error of a client library has, be it in an event of a stream."""
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
    """Return what the gateway said; a body that is still streaming is not read."""
    response = getattr(error, "response", None)
    try:
        body = getattr(response, "text", "")
    except Exception:  # noqa: BLE001  httpx raises when the body was not read
        body = ""
    # `body` is where the SDKs of OpenAI and Anthropic keep the parsed answer.
    return f"{error} {getattr(error, 'body', '')} {body}"
