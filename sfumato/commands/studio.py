"""``sfumato studio``: runs in a browser while they train."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust

if TYPE_CHECKING:
    from sfumato.commands.options import Commands

PORT = 8765
PRIORITY_BELOW_RUNS = 10


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "studio",
        help="show runs in a browser while they train",
        description="Shows the runs below a folder in a browser: curves, every sample, groups with their rewards, runs "
        "beside each other. It reads run folders and needs no run to be at work. From another machine: "
        f"ssh -L {PORT}:localhost:{PORT} HOST, then open the address that it prints.",
    )
    parser.add_argument("folder", type=Path, help="folder with runs, or a run folder")
    parser.add_argument("--port", type=_parse_port, default=PORT, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: this machine alone); at another address everything is sent unencrypted",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="a name by which browsers call this machine, such as that of a proxy; may be given several times",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="let pages save, sample, pause and stop runs, draw samples again, and ask checkpoints",
    )
    add_trust(parser)
    parser.set_defaults(run=run)


def _parse_port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Serves until it is stopped; 0 then."""
    from sfumato.errors import MissingDependencyError

    try:
        from sfumato.studio.serve import serve
    except ImportError as error:
        raise MissingDependencyError(
            f"the studio needs a package that is missing ({error}): pip install sfumato[studio]"
        ) from error
    # a run on the same machine comes first; so do models of the playground, which inherit this
    os.nice(PRIORITY_BELOW_RUNS)
    return serve(
        options.folder,
        options.host,
        options.port,
        tuple(options.name),
        has_control=options.control,
        trusts_code=options.trust_code,
    )
