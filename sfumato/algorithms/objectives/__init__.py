"""Policy objectives: from log-ratios and advantages to a loss per sample."""
