"""Chat templates that write today's date: it is the date of the run's first start, however often it goes on."""

from __future__ import annotations

import datetime
import re

from sfumato.errors import ConfigError

_LITERAL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")
_ANY = re.compile(r"strftime_now\s*\(")


def with_date(template: str, name: str, date: datetime.date) -> str:
    """A chat template that writes a fixed date in the place of today's.

    Args:
        template: Jinja.
        name: of it, for messages.
        date: whose midnight takes the place of now.

    Raises:
        ConfigError: when it asks for today in a form that only it knows.
    """

    def written(call: re.Match[str]) -> str:
        form = call.group(1) if call.group(1) is not None else call.group(2)
        moment = datetime.datetime.combine(date, datetime.time.min)
        return "'" + moment.strftime(form).replace("\\", "\\\\").replace("'", "\\'") + "'"

    fixed = _LITERAL.sub(written, template)
    if _ANY.search(fixed):
        raise ConfigError(
            f"data.chat_template {name} calls strftime_now with a format that is no plain text, so that its prompts "
            "would be others each day and a run could not go on tomorrow: write the format in quotes, or the date"
        )
    return fixed
