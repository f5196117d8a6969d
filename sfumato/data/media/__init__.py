"""Images, videos and sound in files and in conversations: one reader for each, limits, threads, the cache."""
