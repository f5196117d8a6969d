"""``sfumato preprocess``: options. What it makes is in ``preprocess_data``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "preprocess",
        help="tokenise the data of a configuration, and open its media, before a run",
        description="Makes what a run on text makes before its first step: the tokens, and with data.cache_media what "
        "the model's processor makes of images, videos and audio. It needs no GPU and reads no weights.",
        epilog="Any other --section.field VALUE overrides the file, as for a task.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="YAML file of a task that trains on text")
    parser.add_argument("--task", help="task that it is for, such as train_text; found out if not given")
    add_trust(parser)
    parser.set_defaults(run=run, takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    """Makes the data; 0 when it is made."""
    from sfumato.config.load import parse_overrides
    from sfumato.config.shipped import find_shipped

    overrides = parse_overrides(options.overrides)
    from sfumato.commands.preprocess_data import preprocess

    with code_of_configurations(options.trust_code):
        preprocess(find_shipped(options.config), overrides, options.task)
    return 0
