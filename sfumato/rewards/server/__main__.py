"""Starts a reward server and keeps it until it is told to stop."""

from __future__ import annotations

import asyncio
import sys

from sfumato.config.load import parse_config
from sfumato.errors import UserError
from sfumato.kernels import choose_kernels
from sfumato.rewards.server.app import RewardServerConfig, serve
from sfumato.tracking.progress import quiet_other_bars


def main(arguments: list[str] | None = None) -> int:
    """Runs a server and returns its exit code; a user's mistake prints its message and gives 2."""
    choose_kernels()
    quiet_other_bars()
    try:
        asyncio.run(serve(parse_config(RewardServerConfig, arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
