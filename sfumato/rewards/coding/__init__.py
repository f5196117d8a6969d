"""Answers that are programs: where their code stands, and how tests are put to them inside the sandbox."""
