"""How long a call takes, how much memory, and what this machine could do: for the library, the benchmark and users."""
