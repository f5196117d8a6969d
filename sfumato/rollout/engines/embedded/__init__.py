"""The embedded engine: text drawn by transformers' module in this process or one beside it."""
