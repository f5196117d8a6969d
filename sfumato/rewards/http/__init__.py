"""Asking servers: connections, retries, and the messages that go over them."""
