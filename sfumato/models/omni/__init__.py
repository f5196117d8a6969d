"""Models that understand and draw images: their parts, and how they are put together."""
