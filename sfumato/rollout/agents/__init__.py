"""Conversations with tools and with programs of a user: calls, turns, the endpoint that agents draw from."""
