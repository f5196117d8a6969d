"""Policy objectives on trajectories: from what was drawn, its distribution now, and advantages, to a loss per row.

``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step, and ``stats`` are detached sums
over rows, which it divides by their number.
"""
