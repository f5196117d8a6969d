"""Versions of the packages that sfumato builds on, against those that its tests ran with.

Their internals are used: attention, caches, adapters, schedulers. A version that nobody has tried may compute something
else without an error, so ``pyproject.toml`` has an upper bound for them, and a run says when it is exceeded all the
same (packages that were installed without their dependencies, by hand or later).
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement


def required_packages() -> list[Requirement]:
    """What the installed sfumato requires, without extras.

    Raises:
        importlib.metadata.PackageNotFoundError: when sfumato runs from its folder without being installed.
    """
    requirements = map(Requirement, importlib.metadata.requires("sfumato") or [])
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def installed_version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_untested_versions() -> list[str]:
    """A sentence for each installed package outside of the range that was tested. Empty where nobody has installed
    sfumato, which then requires nothing."""
    try:
        requirements = required_packages()
    except importlib.metadata.PackageNotFoundError:
        return []
    sentences = []
    for requirement in requirements:
        version = installed_version(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            sentences.append(
                f"{requirement.name} {version} is not among the versions that sfumato was tested with "
                f"({requirement.specifier}): pip install '{requirement}'"
            )
    return sentences
