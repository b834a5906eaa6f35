"""The command line `tileattn`: what each command takes, and what it does."""
