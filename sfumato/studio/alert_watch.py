"""Tells the webhook of runs that have died or stand still, which such a run cannot do itself."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from sfumato.studio.runs import RunsFolder
from sfumato.studio.secrets import hide_in_text
from sfumato.tracking.alerts import Alert, state_alerts
from sfumato.tracking.lock import NAME
from sfumato.tracking.webhook import Webhook, run_facts

LOOK_EVERY_S = 15.0


class AlertWatch:
    """Looks at all runs that hold a lock.

    A run is told of when it was seen at work before: what had died when the studio was started is no news.
    """

    def __init__(self, runs: RunsFolder, webhook: Webhook) -> None:
        self._runs = runs
        self._webhook = webhook
        self._at_work: set[str] = set()
        self._standing_still: dict[str, str] = {}
        """Texts of the alerts of runs that stand still."""

    async def watch(self) -> None:
        """Looks for as long as the studio runs."""
        while True:
            await run_in_threadpool(self.look)
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Looks once."""
        for name in self._runs.names():
            reader = self._runs.reader(name)
            if reader is None or not ((reader.folder / NAME).exists() or name in self._at_work):
                continue
            reader.refresh()
            state = reader.state(reader.environment())
            if state.state == "running" and name in self._standing_still:
                self._webhook.forget(name, self._standing_still.pop(name))
            if state.state == "standing still" and name not in self._standing_still:
                self._standing_still[name] = f"{state.state}: {state.text}"
                self._tell(name, state_alerts(state.state, state.text))
            elif state.state == "died" and name in self._at_work:
                self._tell(name, state_alerts(state.state, state.text))
            if state.is_alive:
                self._at_work.add(name)
            else:
                self._at_work.discard(name)
                self._standing_still.pop(name, None)

    def _tell(self, name: str, alerts: list[Alert]) -> None:
        reader = self._runs.reader(name)
        if reader is None:
            return
        facts = {**run_facts(reader.folder), "run": name, "step": reader.metrics.last_step}
        for alert in alerts:
            self._webhook.send(Alert(alert.kind, hide_in_text(alert.text), hide_in_text(alert.details)), facts)
