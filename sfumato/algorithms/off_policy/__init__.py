"""Off-policy corrections: samples of an older policy (behaviour) train the newest one (proximal, then new).

``corrections.py`` holds what ``type:`` chooses, ``mismatch.py`` the metrics, ``trajectory.py`` the corrected loss of
objectives on trajectories. A trajectory has steps: denoising steps of a sample, or tokens of a completion.
"""
