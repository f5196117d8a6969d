"""Running rewards over batches: one call, one reward, all of them, in threads or in processes that can be ended."""
