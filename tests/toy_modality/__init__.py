"""A modality of its own: sequences of integers, trained by the shared core without a change of the library."""
