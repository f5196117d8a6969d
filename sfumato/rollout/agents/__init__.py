"""Conversations with tools and with programs of a user: calls, turns, and the endpoint where agents reach the policy."""
