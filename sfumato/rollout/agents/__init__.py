"""Conversations with tools and with programs of a user: calls, turns, the endpoint where agents reach the policy."""
