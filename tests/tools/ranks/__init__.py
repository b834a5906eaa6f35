"""Functions and processes of tests on several ranks."""
