"""The date of the price list is read without an import of the list."""

from __future__ import annotations

import subprocess
import sys
from datetime import date

import pytest

from otel_limits.core.catalogue import RELEASED

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
)


@pytest.mark.parametrize("releases", [RELEASED, {}], ids=["known", "newer"])
def test_date_is_known_without_importing_the_list(releases: dict[str, date]) -> None:
    """Loading it would double the time and the memory of an audit."""
    code = (
        "import datetime, sys; from otel_limits.core import catalogue;"
        f"catalogue.RELEASED = {releases!r};"
        "shown = catalogue.list_in_use(); catalogue.old_list();"
        "sys.exit(' of ' not in shown or 'genai_prices' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
