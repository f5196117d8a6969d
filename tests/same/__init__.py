"""A record of what tiny runs of every task compute, by which a change of the code shows that it changes no result.

    make same                                       # runs all of them and compares
    python -m tests.same compare --only rl_text     # those whose name contains the text
    python -m tests.same write                      # after a change that is meant to change results

The record, ``record.json``, holds for each run its metrics with all digits, a digest of each exported tensor and file,
of each drawn sample, and what the report says of evaluations. Kernels round differently on other kinds of CPU, so the
record names the CPU that it was made on: there everything has to be equal, elsewhere the metrics within a tolerance.
"""
