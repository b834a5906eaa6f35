"""The steps of a call between the public functions and a backend: run, autograd, operators, dispatch."""
