"""Chat templates whose variables have the values of ``data.chat_template_options``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARGUMENTS = ("messages", "tools", "add_generation_prompt")
"""What every chat template is rendered with."""


def with_options(templates: list[str], options: Keywords, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Puts the values of variables in front of chat templates, as defaults.

    Whoever renders the template then sees them, be it training, evaluation, or another program that loads an export;
    one that gives a variable a value of its own is followed.

    Args:
        templates: valid Jinja sources; one that begins with these values already is unchanged.
        options: values by variable, at least one.
        tokenizer: whose special tokens are variables of the template, too.

    Returns:
        The Jinja sources.

    Raises:
        ConfigError: when no template reads a variable, or it has a value already, or the value is none that JSON has;
            the message names the variable.
    """
    variables, fixed = find_variables(templates, tokenizer)
    beginning = ""
    for name, value in options.items():
        if name in fixed:
            raise ConfigError(
                f"data.chat_template_options: {name} is no variable of its own of a chat template: remove it"
            )
        if name not in variables:
            readable = ", ".join(sorted(variables)) or "none"
            raise ConfigError(
                f"data.chat_template_options: the chat template has no variable {name!r}; its variables are {readable}"
            )
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data.chat_template_options.{name}: {value!r} is no value of JSON: {error}") from error
        # Jinja reads Python's literals of such values
        beginning += f"{{%- if {name} is not defined or {name} is none %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
    # transformers drops one line break after a tag: white space at the template's beginning stays as it is
    return [text if text.startswith(beginning) else f"{beginning}\n{text}" for text in templates]


def find_variables(templates: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[set[str], set[str]]:
    """The variables of chat templates whose values may be chosen, and the names that have a value already."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment
    fixed = {*environment.globals, *tokenizer.special_tokens_map, *ARGUMENTS}
    variables = set[str]().union(*(meta.find_undeclared_variables(environment.parse(text)) for text in templates))
    return variables - fixed, fixed
