"""The reward server: ``python -m sfumato.rewards.server CONFIG.yaml``."""
