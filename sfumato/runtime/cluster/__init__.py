"""Roles on Ray: groups and pools of processes. Nothing else in sfumato imports ray."""
