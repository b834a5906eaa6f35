"""The command line `tileattn`: its commands, their options, and their code."""
