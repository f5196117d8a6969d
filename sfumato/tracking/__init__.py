"""What a run leaves behind: metrics, samples, progress, report."""
