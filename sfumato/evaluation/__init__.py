"""Trained models at work: what they draw and answer, beside each other, and how well."""
