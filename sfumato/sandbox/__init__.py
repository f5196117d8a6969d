"""Runs programs that nobody has read: in Linux namespaces, without network, with limits."""
