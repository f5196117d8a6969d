"""Every causal language model of transformers, at a size that a test can run."""
