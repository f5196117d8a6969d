"""What a run of RL needs beside its model: the engine's program, what rewards load, and what only the run finds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import UserError
from sfumato.rollout.kinds.base import RolloutKind

if TYPE_CHECKING:
    from sfumato.config.rl import RLConfig


@dataclass
class ProgramFindings:
    """What is missing for rewards and engine, and what was not looked at."""

    missing: list[str] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)


def check_programs(config: RLConfig) -> ProgramFindings:
    """Looks for programs, packages, model folders and keys; loads nothing, and asks no server."""
    findings = ProgramFindings()
    for reward in config.reward.rewards:
        try:
            only_the_run_finds = reward.check_installed()
        except UserError as error:
            text = str(error)
            findings.missing.append(text if reward.label in text else f"reward {reward.label!r}: {text}")
            continue
        if only_the_run_finds:
            findings.not_looked_at.append(f"reward {reward.label!r}: {only_the_run_finds}")
    if isinstance(config, TextRLConfig):
        engine = config.rollout.engine
        kind = config.rollout.kind
        try:
            only_the_run_finds = engine.check_installed()
        except UserError as error:
            findings.missing.append(str(error))
        else:
            if only_the_run_finds:
                findings.not_looked_at.append(f"rollout.engine {engine.type}: {only_the_run_finds}")
        if type(kind).prepare is not RolloutKind.prepare:
            findings.not_looked_at.append(f"rollout.kind {kind.type}: what it needs to draw")
    if config.runtime.backend == "ray":
        findings.not_looked_at.append("runtime.backend ray: the cluster, and what is installed on its nodes")
    return findings
