"""The suite "modules" of `tileattn bench`: time and memory of the modules of `tileattn.nn`, beside NaiveAttention."""
