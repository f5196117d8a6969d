"""Ranks for the tests of this folder."""

import pytest

from sfumato.tracking.run import Run
from tests.dist.ranks import RankPool


@pytest.fixture(autouse=True)
def without_reports(monkeypatch):
    """No test here looks at ``report.html``, whose curves take longer than a tiny run; ranks leave it out too."""
    monkeypatch.setattr(Run, "write_report", lambda run, **_: None)


@pytest.fixture(scope="session")
def ranks():
    """``ranks.run(4, function, *args)`` runs a module-level function on 4 ranks of a gloo group."""
    pool = RankPool()
    yield pool
    pool.close()
