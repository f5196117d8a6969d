"""Versions of the packages that sfumato builds on, against those that its tests ran with.

Their internals are used: attention, caches, adapters, schedulers. A version that nobody has tried may compute something
else without an error, so ``pyproject.toml`` has an upper bound for them, and a run says when it is exceeded all the
same (packages that were installed without their dependencies, by hand or later).
"""

from __future__ import annotations

import importlib.metadata
import traceback

from packaging.requirements import Requirement

IMPORTING = ("torch", "transformers", "diffusers", "peft", "accelerate", "sfumato")
"""Modules whose frames stand around an import that fails; what they import does not fit."""


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


def describe_broken_package(error: BaseException) -> str:
    """Names the package that keeps a library from being imported, with the remedy; empty for other errors.

    transformers and diffusers import their modules late, and optional packages with them as soon as they are installed:
    one that does not fit torch (``operator torchvision::nms does not exist``) ends in an error about a class of models.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if not any(str(link).startswith(("Could not import module", "Failed to import")) for link in chain):
        return ""
    # the frames of a cause begin where it was caught: in the library that imports late
    frames = (frame for cause in chain[1:] for frame, _ in traceback.walk_tb(cause.__traceback__))
    modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    names_by_module = importlib.metadata.packages_distributions()
    optional = [module for module in modules if module in names_by_module and module not in IMPORTING]
    if not optional:
        return ""
    package = names_by_module[optional[-1]][0]
    reason = f"{type(chain[-1]).__name__}: {chain[-1]}".partition("\n")[0]
    return (
        f"{package} {installed_version(package) or ''} is installed, but cannot be imported ({reason}), which keeps "
        "transformers and diffusers from being imported: install the version that fits torch "
        f"{installed_version('torch')}, or pip uninstall {package}"
    )


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
