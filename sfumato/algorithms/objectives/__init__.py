"""Policy objectives: from what was sampled, the policy's present prediction and advantages to a loss per row.

``kind`` says what an objective is given: the steps of a trajectory (``trajectory.py``) or noised final samples
(``sample.py``). Either way ``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step, and
``stats`` are detached sums over rows, which it divides by their number.
"""
