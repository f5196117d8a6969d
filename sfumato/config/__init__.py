"""Typed configuration: YAML file first, dotted overrides after it, every mistake named."""
