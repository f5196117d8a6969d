"""Three machines made of namespaces, for the tests of a module; skipped where they are not permitted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.namespaces import Nodes, refusal


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if reason := refusal():
        pytest.skip(reason)
    with Nodes(tmp_path_factory.mktemp("nodes"), ["alfa", "bravo", "carol"]) as made:
        yield made
