"""Roles: what lives where, and how work reaches it. In one process a role is an object here."""
