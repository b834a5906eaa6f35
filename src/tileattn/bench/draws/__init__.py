"""The suite random: shapes that nobody tuned for, drawn from what models have."""
