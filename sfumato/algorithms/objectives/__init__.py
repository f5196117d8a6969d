"""Policy objectives on ratios of probabilities: from log-ratios of decisions and advantages to a loss per row.

``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step, and ``stats`` are detached sums
over rows, which it divides by their number.
"""
