"""Rows and heads from rank to rank."""
