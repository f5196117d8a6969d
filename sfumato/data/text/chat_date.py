"""Chat templates that write today's date get the date of the run's first start, however often the run is resumed."""

from __future__ import annotations

import datetime
import re

from sfumato.errors import ConfigError

_LITERAL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")
_ANY = re.compile(r"strftime_now\s*\(")


def with_date(template: str, name: str, date: datetime.date) -> str:
    """Replaces calls of ``strftime_now`` in a chat template by the text that they give for a fixed date.

    Args:
        template: Jinja source.
        name: of the template, for messages.
        date: its midnight takes the place of the current time.

    Raises:
        ConfigError: when a call has a format that is not a literal text.
    """

    def literal(call: re.Match[str]) -> str:
        form = call.group(1) if call.group(1) is not None else call.group(2)
        moment = datetime.datetime.combine(date, datetime.time.min)
        return "'" + moment.strftime(form).replace("\\", "\\\\").replace("'", "\\'") + "'"

    fixed = _LITERAL.sub(literal, template)
    if _ANY.search(fixed):
        raise ConfigError(
            f"data.chat_template {name} calls strftime_now with a format that is no plain text, so that its prompts "
            "would be others each day and a run could not go on tomorrow: write the format in quotes, or the date"
        )
    return fixed
