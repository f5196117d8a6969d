"""Objectives on the forward process: final samples get fresh noise, and the loss depends on the predictions there.

``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step; ``stats`` are detached sums over
rows, which the caller divides by the number of rows.
"""
