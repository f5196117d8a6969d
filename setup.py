"""What pyproject.toml cannot say: tasks, configurations and examples lie at the top, and in the package when built."""

from setuptools import find_packages, setup

SHIPPED = {"sfumato.tasks": "tasks", "sfumato.configs": "configs", "sfumato.docs.examples": "docs/examples"}

setup(
    packages=[*find_packages(include=["sfumato*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "*": ["*.jinja"],
        "sfumato": ["py.typed"],
        "sfumato.configs": ["**/*.yaml", "**/*.jsonl"],
    },
)
