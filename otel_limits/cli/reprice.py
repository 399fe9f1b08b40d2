"""The command `ledger reprice`: reprices calls of a ledger, and prints what changed."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from otel_limits.audit.question import SELECTION
from otel_limits.cli.ledger_options import add_ledger_command, add_option, open_ledger, selection_of
from otel_limits.cli.terminal import working
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.settings.policy.file import valid_document

if TYPE_CHECKING:
    from otel_limits.core.pricing import Prices
    from otel_limits.ledger.repricing import Repriced

TEXT = "Price unpriced calls with the policy file and the current price list."


def add(group: Any) -> None:
    """Add `reprice` to the commands of `ledger`."""
    parser = add_ledger_command(group, "reprice", TEXT, reprice)
    for option in SELECTION:
        add_option(parser, option)
    parser.add_argument("--all", action="store_true", help="include calls that have a price")
    parser.add_argument("--dry-run", action="store_true", help="only show what would change")


def reprice(arguments: Namespace) -> int:
    """Reprice calls, and print what changed."""
    from otel_limits.ledger.repricing import reprice as price_again

    prices = _present_prices()
    chosen = selection_of(arguments)
    with open_ledger(arguments) as database, working("Pricing") as work:
        done = price_again(
            database, prices, chosen, work, every=arguments.all, writes=not arguments.dry_run
        )
    sys.stdout.write(_account_of(done, is_dry=arguments.dry_run))
    return 0


def _present_prices() -> Prices:
    """Read the current prices.

    Raises:
        ConfigurationError: The policy file contains mistakes.
        LedgerError: There are no prices.
    """
    from otel_limits.core.pricing import Prices, missing_prices

    prices = Prices(valid_document().price_list())
    if not prices.available:
        raise LedgerError(f"Pricing {missing_prices()}")
    return prices


def _account_of(done: Repriced, *, is_dry: bool) -> str:
    """Describe the changes by model."""
    from otel_limits.audit.answer import money

    verbs = ("would be", "would be") if is_dry else ("was", "were")
    seen = pluralize(done.seen, f"model call {verbs[0]}", f"model calls {verbs[1]}")
    lines = [f"{done.changed:,} of {seen} repriced."]
    for model, change in sorted(done.by_model.items()):
        lines.append(
            f"{model}: {pluralize(change.calls, 'call')}, {change.was_unpriced:,} without a price; "
            f"{money(change.former)} before, {money(change.now)} now."
        )
    if done.still_unpriced:
        calls = done.still_unpriced.total()
        still = pluralize(calls, "model call still has", "model calls still have")
        models = ", ".join(sorted(done.still_unpriced))
        lines.append(f"{still} no price: {models}.")
        lines.append("Missing prices can be set in the policy file under models.")
    return "".join(f"{line}\n" for line in lines)
