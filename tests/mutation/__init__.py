"""A test of the tests: breaks one line of the library at a time and looks whether a test fails.

python -m tests.mutation map                  # which test runs which line: once, takes as long as the whole suite
python -m tests.mutation run --count 240      # breaks lines, runs the tests that reach them, prints what survives
"""
