"""Objectives on the forward process: final samples are noised anew, and the loss looks at what is predicted there.

``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step, and ``stats`` are detached sums
over rows, which it divides by their number.
"""
