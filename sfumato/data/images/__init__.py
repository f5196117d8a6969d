"""Images with captions: folders, buckets of sizes, pairs for preferences, prompts."""
