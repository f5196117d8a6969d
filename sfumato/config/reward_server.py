"""The configuration of a reward server."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant


class RewardServerConfig(Section):
    """Serves rewards to other processes and machines."""

    usage: ClassVar[str] = "python -m sfumato.rewards.server CONFIG.yaml [--field VALUE ...]"

    rewards: list[Annotated[Any, Variant("sfumato.rewards")]] = Field(min_length=1)
    """What is served, each under its label; weight and evaluation_only are the run's business and mean nothing here."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network of this machine, then set token_env."""
    port: int = Field(8642, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""
    token_env: str | None = None
    """Name of the environment variable with the key that clients must send (their api_key_env); null asks for none."""
    max_batch_size: int = Field(32, ge=1)
    """Samples in one call of a reward; a group is never cut."""
    max_wait_ms: float = Field(0.0, ge=0, le=10_000)
    """How long small requests wait to be scored together; 0 never joins requests, so that a value cannot depend on
    what else is scored at the time."""
    max_request_mib: int = Field(256, ge=1, le=4096)
    """Size of the body of one request."""
    max_queue: int = Field(32, ge=1)
    """Requests that are read, waiting or being scored; more are told to come again later (status 429)."""

    @model_validator(mode="after")
    def _token_is_set(self) -> RewardServerConfig:
        if self.token_env is not None and not os.environ.get(self.token_env, "").strip():
            raise ValueError(f"token_env names the environment variable {self.token_env}, which is not set: export it")
        return self
