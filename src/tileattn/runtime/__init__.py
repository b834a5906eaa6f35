"""A call's way from the API to a backend: run, autograd, operators, dispatch."""
