"""The actor's weights to the sampler: in buckets, whatever the two layouts, and verified."""
