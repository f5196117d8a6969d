"""Ranks for the tests of this folder."""

import pytest

from tests.dist.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """``ranks.run(4, function, *args)`` runs a module-level function on 4 ranks of a gloo group."""
    pool = RankPool()
    yield pool
    pool.close()
